"""Multi-query associative recall (MQAR): pairs of words, then several of the keys; the value of the last key is asked for.

As in "Zoology: Measuring and Improving Recall in Efficient Language Models" (arXiv 2312.04927), in words. The prompt has
`pairs` lines of a key and its value, an empty line, then `queries` keys, each on a line of its own. The earlier keys stand with
their right values. The model's answer is the value, among those of all pairs, whose tokens have the largest summed
log-probability. Chance is 1 / pairs. Keys and values are distinct words of disjoint sets, and no key is asked for twice. Unlike
the paper's, queries come in random order: the power law for the distance between a pair and its query is left out.
"""

import random
from dataclasses import dataclass

from surgery.errors import UserError
from surgery.probes.question import Question, with_spans
from surgery.probes.toy import KEYS, Keys, key_words

MOST_PAIRS = len(KEYS) // 2


@dataclass(frozen=True)
class MQAR:
    """pairs: at most 64. queries: how many keys follow, at most `pairs`; all but the last have their values. keys: which words
    may occur, as for kv; without "all", at most 32 pairs."""

    pairs: int
    queries: int = 4
    keys: Keys = "all"

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= MOST_PAIRS:
            raise UserError(f"mqar takes 1 to {MOST_PAIRS} pairs, not {self.pairs}")
        if not 1 <= self.queries <= self.pairs:
            raise UserError(f"mqar with {self.pairs} pairs takes 1 to {self.pairs} queries, not {self.queries}")
        key_words(self.keys, 2 * self.pairs)

    def questions(self, n: int, seed: int) -> list[Question]:
        rng = random.Random(f"mqar {self.pairs} {self.queries} {seed}")
        questions = []
        for _ in range(n):
            chosen = rng.sample(key_words(self.keys, 2 * self.pairs), 2 * self.pairs)
            keys, values = chosen[: self.pairs], chosen[self.pairs :]
            lines = [f"{key} {value}\n" for key, value in zip(keys, values, strict=True)]
            prompt, spans = with_spans("", lines)
            *answered, last = rng.sample(range(self.pairs), self.queries)
            prompt += "\n" + "".join(lines[i] for i in answered) + keys[last]
            questions.append(Question(prompt, tuple(f" {value}" for value in values), last, spans, last))
        return questions


PROBE = MQAR
