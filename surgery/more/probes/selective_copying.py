"""Selective copying of "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752, section 4.1), in
words.

`count` content words stand at random places among noise words, and the model has to write the content words in order. Content
words are concrete nouns, all different; noise words are function words, which are frequent in any text. A model that was not
trained on the task cannot guess it, so a solved example of the same size, with other content words, comes first.
"""

import random
from dataclasses import dataclass

from surgery.errors import UserError
from surgery.probes.question import Completion
from surgery.world.words import KEYS, Keys, key_words

NOISE = "about after also and at because but by for from in it of on that the then to with".split()
MOST = len(KEYS) // 2


@dataclass(frozen=True)
class SelectiveCopying:
    """Selective copying: the nouns among noise words have to be written in their order.

    count: nouns, at most 64. length: words in all. keys: which nouns may occur, as for `kv`; without "all", at most 32."""

    count: int
    length: int
    keys: Keys = "all"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST:
            raise UserError(f"selective_copying takes a count of 1 to {MOST} words, not {self.count}")
        if self.length < self.count:
            raise UserError(f"selective_copying takes a length of at least its count {self.count}, not {self.length}")
        key_words(self.keys, 2 * self.count)

    def completions(self, n: int, seed: int) -> list[Completion]:
        rng = random.Random(f"selective copying {self.count} {self.length} {seed}")
        return [self._completion(rng) for _ in range(n)]

    def _completion(self, rng: random.Random) -> Completion:
        chosen = rng.sample(key_words(self.keys, 2 * self.count), 2 * self.count)
        example, answer = chosen[: self.count], chosen[self.count :]
        prompt = f"{self._task(rng, example)} {' '.join(example)}\n\n{self._task(rng, answer)}"
        return Completion(prompt, "".join(f" {word}" for word in answer))

    def _task(self, rng: random.Random, content: list[str]) -> str:
        words = rng.choices(NOISE, k=self.length)
        for place, word in zip(sorted(rng.sample(range(self.length), self.count)), content, strict=True):
            words[place] = word
        return f"Text: {' '.join(words)}\nNouns:"


PROBES = {"selective_copying": SelectiveCopying}
