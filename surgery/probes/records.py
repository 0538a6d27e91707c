"""Records: lines whose keys and values are several tokens each, with words between; the value of one key is asked for.

"* anchor bell was near the old lamp at noon with a red cat": the value lies further from its key than a convolution of four
taps reaches, so that something else has to gather the record. A word of a key stands in several keys, so that no single word
tells a record. The model's answer is the value, among those of some records, whose tokens have the largest summed
log-probability. Chance is 1 / choices.
"""

import random
from dataclasses import dataclass

from surgery.errors import UserError
from surgery.probes.choice import WHEN
from surgery.probes.kv import OPENING
from surgery.probes.question import Question, with_spans
from surgery.probes.toy import ADJECTIVES, RELATIONS, THINGS, Keys, key_words

MOST_PAIRS = 64
MOST_WORDS = 16  # in the first place of a key, and in the second
VALUES = tuple(f"{color} {pet}" for color in RELATIONS["color"][1] for pet in RELATIONS["pet"][1])


def draw_keys(rng: random.Random, count: int, keys: Keys) -> list[str]:
    """Distinct keys of two words, in random order. Each word stands in two keys or more; two may stand in one."""
    side = min((count + 1) // 2, MOST_WORDS)
    words = rng.sample(key_words(keys, 2 * side), 2 * side)
    # In a grid of first and second words, each diagonal has one key of every word.
    cells = [(words[i], words[side + (i + shift) % side]) for shift in range(side) for i in range(side)]
    return [" ".join(cell) for cell in rng.sample(cells[:count], count)]


@dataclass(frozen=True)
class Records:
    """pairs: records of a prompt, 4 to 64. choices: values among which one is right, at most `pairs`. keys: which words may be
    in keys, as for kv."""

    pairs: int = 8
    choices: int = 4
    keys: Keys = "all"

    def __post_init__(self) -> None:
        if not 4 <= self.pairs <= MOST_PAIRS:
            raise UserError(f"records takes 4 to {MOST_PAIRS} pairs, not {self.pairs}")
        if not 2 <= self.choices <= self.pairs:
            raise UserError(f"records with {self.pairs} pairs takes 2 to {self.pairs} choices, not {self.choices}")

    def questions(self, n: int, seed: int) -> list[Question]:
        rng = random.Random(f"records {self.pairs} {self.choices} {seed}")
        return [self._question(rng) for _ in range(n)]

    def _question(self, rng: random.Random) -> Question:
        keys = draw_keys(rng, self.pairs, self.keys)
        values = rng.sample(VALUES, self.pairs)
        prompt, spans = with_spans(OPENING, (self._line(rng, key, value) for key, value in zip(keys, values, strict=True)))
        chosen = rng.sample(range(self.pairs), self.choices)
        answer = rng.randrange(self.choices)
        prompt += f"The pet of {keys[chosen[answer]]} is a"
        return Question(prompt, tuple(f" {values[i]}" for i in chosen), answer, spans, chosen[answer])

    @staticmethod
    def _line(rng: random.Random, key: str, value: str) -> str:
        return f"* {key} was near the {rng.choice(ADJECTIVES)} {rng.choice(THINGS)} {rng.choice(WHEN)} with a {value}\n"


PROBE = Records
