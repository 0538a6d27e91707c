"""Two hops: the value of a key is the key of another entry, and the value of that one is asked for.

A dictionary as that of kv.py, from keys to words and from these words to distinct numbers; its lines stand in any order. Chance
is 1 / pairs. A model that answers one hop alone has to find the first line, and then to look for what it has found: by the same
heads, or by others behind them.
"""

import random
from dataclasses import dataclass

from surgery.errors import UserError
from surgery.probes.kv import MOST_PAIRS, OPENING
from surgery.probes.question import Question, with_spans
from surgery.probes.toy import Keys, key_words


@dataclass(frozen=True)
class TwoHops:
    """pairs: chains of two entries each, at most 64. keys: which words may be keys, as for kv; without "all", at most 32."""

    pairs: int
    keys: Keys = "all"

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise UserError(f"hops takes at least 1 pair, not {self.pairs}")
        key_words(self.keys, 2 * self.pairs)

    def questions(self, n: int, seed: int) -> list[Question]:
        rng = random.Random(f"two hops {self.pairs} {seed}")
        questions = []
        for _ in range(n):
            words = rng.sample(key_words(self.keys, 2 * self.pairs), 2 * self.pairs)
            keys, between = words[: self.pairs], words[self.pairs :]
            numbers = [str(number) for number in rng.sample(range(MOST_PAIRS), self.pairs)]
            entries = [*zip(keys, between, strict=True), *zip(between, numbers, strict=True)]
            chosen = rng.randrange(self.pairs)
            order = rng.sample(range(2 * self.pairs), 2 * self.pairs)
            prompt, spans = with_spans(OPENING, (":".join(entries[i]) + "\n" for i in order))
            prompt += f"The value of the value of the key '{keys[chosen]}' is"
            questions.append(Question(prompt, tuple(numbers), chosen, spans, order.index(self.pairs + chosen)))
        return questions


PROBE = TwoHops
