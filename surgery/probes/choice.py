"""Multiple choice: facts as questions with lettered options; knowing the answer is not enough, its letter has to be retrieved.

The paper's point: on tasks of this form (MMLU) a state-space model falls behind although its knowledge is as good.
`length`: by default an option is a single word. "long" has options of 9 or 10 words (MMLU: 6 to 12), with the answer's word far
from the letter and from the end, so that a convolution of four taps cannot bring them together.
"""

import random
from dataclasses import dataclass
from typing import Literal

from surgery.errors import UserError
from surgery.probes.knowledge import Part, read_facts
from surgery.probes.question import Question, with_spans
from surgery.probes.toy import ADJECTIVES, THINGS, facts, is_held_out
from surgery.records.recipe import TOY

LETTERS, LONG = "ABCD", 9
WHEN = ("in the morning", "at noon", "in the evening", "at midnight", "in the spring", "at dawn", "in the rain", "at market")


def lettered(
    rng: random.Random,
    question: str,
    answer: str,
    choices: tuple[str, ...],
    held_out: bool | None = None,
    length: Literal["word", "long"] | int = "word",
) -> Question:
    """The question with four options in random order, one of them right; the choices are the letters.

    held_out: draw a prompt of the training split (False) or of the held-out one (True), by a hash of its text.
    length: "word", "long", or how many words there are beside the one that matters, up to LONG.
    """
    words = length if isinstance(length, int) else {"word": 0, "long": LONG}[length]
    while True:
        options = [answer, *rng.sample([choice for choice in choices if choice != answer], len(LETTERS) - 1)]
        rng.shuffle(options)
        right = options.index(answer)
        texts = options
        if words:  # as many before the one that matters as after it; with LONG, 9 or 10 in all
            texts = []
            for option in options:
                before = f"{rng.choice(WHEN)} with the".split()
                after = f"near the {rng.choice(ADJECTIVES)} {rng.choice(THINGS)}".split()
                begin = max(0, len(before) - (words + 1) // 2)
                texts.append(" ".join([*before[begin:], option, *after[: words // 2]]))
        lines = (f"{letter}. {text}\n" for letter, text in zip(LETTERS, texts, strict=True))
        prompt, spans = with_spans(f"Question: {question}\n", lines)
        prompt += "Answer:"
        if held_out is None or is_held_out(prompt) == held_out:
            return Question(prompt, tuple(f" {letter}" for letter in LETTERS), right, spans, right)


@dataclass(frozen=True)
class MultipleChoice:
    """source, part: as for knowledge; of a file, beyond planning and tuning, at most one question a fact. length: "word" or
    "long"."""

    source: str = TOY
    part: Part | None = None
    length: Literal["word", "long"] = "word"

    def questions(self, n: int, seed: int) -> list[Question]:
        if self.source == TOY:
            tune = self.part == "tune"
            rng = random.Random(f"skill letters {seed}" if tune else f"letters {seed}")
            pool = [(fact.question, fact.value, fact.choices) for fact in facts()]
            drawn = rng.choices(pool, k=n) if tune else (rng.choice(pool) for _ in range(n))
            return [lettered(rng, *each, held_out=not tune, length=self.length) for each in drawn]
        if self.length != "word":
            raise UserError("choice: length is for the facts of the toy data; a file's options are as long as it has them")
        lines = [line for line in read_facts(self.source, self.part) if len(line.choices) >= len(LETTERS)]
        if not lines:
            raise UserError(f"{self.source}: multiple choice needs at least {len(LETTERS)} choices a fact")
        rng = random.Random(f"letters {seed}")
        pool = [(line.question or line.prompt, line.answer.strip(), tuple(c.strip() for c in line.choices)) for line in lines]
        drawn = rng.choices(pool, k=n) if self.part == "tune" else rng.sample(pool, min(n, len(pool)))
        return [lettered(rng, *each) for each in drawn]


PROBE = MultipleChoice
