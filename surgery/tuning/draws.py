"""Which source of a mixture of text each excerpt is taken from."""

import random
from array import array
from collections.abc import Sequence
from typing import overload

from surgery.records.recipe import Data
from surgery.tuning.text_sources import Reading, Source, open_source


def open_sources(data: Data, reading: Reading) -> list[Source]:
    return [open_source(text, reading) for text in data.train_text]


class Draws(Sequence[tuple[int, int]]):
    """`count` random choices among the weights, each with the number of earlier draws of the same choice. A larger count begins
    with the same draws. Each is drawn when it is first asked for, with those before it: a training that is to take millions of
    steps begins at once."""

    def __init__(self, key: str, weights: list[float], count: int):
        self._rng, self._weights, self._count = random.Random(key), weights, count
        self._choices, self._earlier, self._before = array("l"), array("q"), [0] * len(weights)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, int]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        numbers = range(self._count)[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        while len(self._choices) <= numbers:
            (choice,) = self._rng.choices(range(len(self._weights)), self._weights)
            self._choices.append(choice)
            self._earlier.append(self._before[choice])
            self._before[choice] += 1
        return self._choices[numbers], self._earlier[numbers]
