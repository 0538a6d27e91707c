"""Compare: records of who has how many; of two of them, the one with more is asked for.

Two records have to be found and put side by side, so a single match does not answer the question. A number stands further
from its owner than a convolution of four taps reaches. The model's answer is the owner, of the two, whose tokens have the
largest summed log-probability. Chance is 1 / 2.
"""

import random
from dataclasses import dataclass

from surgery.errors import UserError
from surgery.probes.kv import OPENING
from surgery.probes.question import Question, with_spans
from surgery.probes.toy import PLACES, THINGS, Keys, key_words

MOST_PAIRS = 64


@dataclass(frozen=True)
class Compare:
    """pairs: records of a prompt, 2 to 64. apart: by how much the two numbers differ, at least. keys: which words may be
    owners, as for kv."""

    pairs: int = 8
    apart: int = 10
    keys: Keys = "all"

    def __post_init__(self) -> None:
        if not 2 <= self.pairs <= MOST_PAIRS:
            raise UserError(f"compare takes 2 to {MOST_PAIRS} pairs, not {self.pairs}")
        if not 1 <= self.apart <= 50:
            raise UserError(f"compare takes numbers 1 to 50 apart, not {self.apart}")
        key_words(self.keys, self.pairs)

    def questions(self, n: int, seed: int) -> list[Question]:
        rng = random.Random(f"compare {self.pairs} {self.apart} {seed}")
        return [self._question(rng) for _ in range(n)]

    def _question(self, rng: random.Random) -> Question:
        owners = rng.sample(key_words(self.keys, self.pairs), self.pairs)
        one, other = rng.sample(range(self.pairs), 2)
        numbers = [rng.randrange(100) for _ in owners]
        while abs(numbers[one] - numbers[other]) < self.apart:
            numbers[one], numbers[other] = rng.randrange(100), rng.randrange(100)
        between = [f"near {rng.choice(PLACES)} with the {rng.choice(THINGS)}" for _ in owners]
        lines = zip(owners, between, numbers, strict=True)
        prompt, spans = with_spans(OPENING, (f"* {owner} {words} {number}\n" for owner, words, number in lines))
        prompt += f"Of {owners[one]} and {owners[other]} the one with more is"
        answer = int(numbers[other] > numbers[one])
        return Question(prompt, (f" {owners[one]}", f" {owners[other]}"), answer, spans, (one, other)[answer])


PROBE = Compare
