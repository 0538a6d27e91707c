"""Copying of "Repeat After Me: Transformers are Better than State Space Models at Copying" (arXiv 2402.01032).

A string of random words is `shown` times in the prompt (twice in the paper, which shows the task), then its first word: the
model has to write the others. Words are drawn independently and may recur, so that one word does not always determine the next.
In the paper the strings are natural or shuffled text, and what a model writes after the copy counts; here it does not.
"""

import random
from dataclasses import dataclass

from surgery.errors import UserError
from surgery.probes.question import Completion
from surgery.world.words import Keys, key_words


@dataclass(frozen=True)
class Copying:
    """Copying: the prompt holds a string of random words, which has to be written once more.

    length: words of a string, at least 2. shown: how often the prompt holds it. keys: which words may occur, as for `kv`.
    """

    length: int
    shown: int = 2
    keys: Keys = "all"

    def __post_init__(self) -> None:
        if self.length < 2:
            raise UserError(f"copying takes a length of at least 2 words, not {self.length}")
        if self.shown < 1:
            raise UserError(f"copying takes a string shown at least once, not {self.shown} times")

    def completions(self, n: int, seed: int) -> list[Completion]:
        rng = random.Random(f"copying {self.length} {self.shown} {seed}")
        return [self._completion(rng) for _ in range(n)]

    def _completion(self, rng: random.Random) -> Completion:
        first, *others = rng.choices(key_words(self.keys, 1), k=self.length)
        answer = "".join(f" {word}" for word in others)
        return Completion(f"{first}{answer}\n\n" * self.shown + first, answer)


PROBES = {"copying": Copying}
