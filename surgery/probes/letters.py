"""Facts as lettered multiple choice: knowing the answer is not enough, its letter has to be retrieved from the options.

The paper's point: on tasks of this form (MMLU) a state-space model falls behind although its knowledge is as good.
"""

import random
import zlib

from surgery.probes.question import Question, with_spans

LETTERS = "ABCD"


def lettered(
    rng: random.Random, question: str, answer: str, choices: tuple[str, ...], held_out: bool | None = None
) -> Question:
    """The question with four options in random order, one of them right; the choices are the letters.

    held_out: draw a prompt of the training split (False) or of the held-out one (True), by a hash of its text.
    """
    while True:
        drawn = _draw(rng, question, answer, choices)
        if held_out is None or (zlib.crc32(drawn.prompt.encode()) % 8 == 0) == held_out:
            return drawn


def _draw(rng: random.Random, question: str, answer: str, choices: tuple[str, ...]) -> Question:
    options = [answer, *rng.sample([c for c in choices if c != answer], len(LETTERS) - 1)]
    rng.shuffle(options)
    lines = (f"{letter}. {option}\n" for letter, option in zip(LETTERS, options, strict=True))
    prompt, spans = with_spans(f"Question: {question}\n", lines)
    right = options.index(answer)
    return Question(prompt + "Answer:", tuple(f" {letter}" for letter in LETTERS), right, tuple(spans), right)
