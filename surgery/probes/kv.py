"""Key-value retrieval: a dictionary, then one of its keys, whose value is asked for.

As in "Understanding the Skill Gap in Recurrent Language Models" (arXiv 2504.18574), zero-shot: `pairs` random words, each with
its own integer from 0 to 99. The prompt ends without a space; the model's answer is the value, among those in the dictionary,
whose tokens have the largest summed log-probability. Chance is 1 / pairs. Where the published code is unseeded, this one takes
a seed, which words may be keys, and how many words stand between a key and its value: from three on the value is further from
its key than a convolution of four taps reaches, and something else has to gather the two. With `joint`, keys are of two words,
each of which other keys share, so that the value depends on both: joint recall (arXiv 2507.00449).
"""

import math
import random
from dataclasses import dataclass

from surgery.errors import UserError
from surgery.probes.question import Question, with_spans
from surgery.probes.toy import ADJECTIVES, THINGS, Keys, key_words

OPENING = "Memorize the following dictionary:\n"
MOST_PAIRS = 100
MOST_BETWEEN = 100


def ask_value(key: str) -> str:
    """The question, up to the value."""
    return f"The value of the key '{key}' is"


def draw_dictionary(rng: random.Random, pairs: int, keys: Keys = "all", joint: bool = False) -> dict[str, str]:
    """Distinct words, or pairs of words, with distinct integers 0-99."""
    if joint:
        side = math.isqrt(pairs - 1) + 1
        words = rng.sample(key_words(keys, 2 * side), 2 * side)
        drawn = rng.sample([f"{first} {second}" for first in words[:side] for second in words[side:]], pairs)
    else:
        drawn = rng.sample(key_words(keys, pairs), pairs)
    return dict(zip(drawn, map(str, rng.sample(range(MOST_PAIRS), pairs)), strict=True))


def write_entry(rng: random.Random, key: str, value: str, between: int = 0) -> str:
    """A line of the dictionary, with so many words between key and value."""
    return f"{' '.join([key, *rng.choices(ADJECTIVES + THINGS, k=between)])}:{value}\n"


@dataclass(frozen=True)
class KVRetrieval:
    """pairs: entries of a dictionary, at most 100. keys: which words may be keys: "all", "seen" (those that tuning may use) or
    "unseen" (those that it does not); of the latter two there are 64 each. between: words between a key and its value. joint:
    keys are of two words, each of which about the square root of `pairs` keys share."""

    pairs: int
    keys: Keys = "all"
    between: int = 0
    joint: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= MOST_PAIRS:
            raise UserError(f"kv takes 1 to {MOST_PAIRS} pairs, not {self.pairs}")
        if not 0 <= self.between <= MOST_BETWEEN:
            raise UserError(f"kv takes 0 to {MOST_BETWEEN} words between a key and its value, not {self.between}")
        draw_dictionary(random.Random(0), self.pairs, self.keys, self.joint)

    def questions(self, n: int, seed: int) -> list[Question]:
        rng = random.Random(f"kv {self.pairs} {seed}")  # the same numbers for all keys
        questions = []
        for _ in range(n):
            entries = draw_dictionary(rng, self.pairs, self.keys, self.joint)
            prompt, spans = with_spans(OPENING, (write_entry(rng, *entry, self.between) for entry in entries.items()))
            answer = rng.randrange(self.pairs)
            prompt += ask_value(list(entries)[answer])
            questions.append(Question(prompt, tuple(entries.values()), answer, spans, answer))
        return questions


PROBE = KVRetrieval
