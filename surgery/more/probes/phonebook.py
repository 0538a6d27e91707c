"""Phone book lookup of "Repeat After Me: Transformers are Better than State Space Models at Copying" (arXiv 2402.01032).

The prompt has `entries` lines "Name: number", then two of them again as examples, then a third name. Names are distinct;
numbers have ten digits, the first from 6 to 9, as in the paper. In the paper a model has to write the number. Here its answer
is the number, among those of the book, whose tokens have the largest summed log-probability, so that chance is 1 / entries.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from surgery.errors import UserError
from surgery.probes.question import Question, with_spans

FIRST = """
    Aaron Alice Amy Anna Arthur Barbara Brian Carol Claire Daniel David Diana Edith Edward Ellen Emma Frank George Grace Hannah
    Harold Helen Henry Irene Jack James Jane John Julia Karen Laura Louis Lucy Mark Martha Mary Oscar Paul Peter Rachel Robert
    Rose Ruth Samuel Sarah Simon Susan Thomas Victor Walter
""".split()
LAST = """
    Adams Allen Baker Barnes Bennett Brooks Brown Butler Carter Clark Collins Cook Cooper Cox Davis Edwards Evans Fisher Foster
    Gray Green Hall Harris Hughes Jackson Johnson Jones King Lee Lewis Long Martin Miller Moore Morgan Myers Parker Perry Price
    Reed Ross Scott Smith Taylor Turner Walker Ward White Wood Young
""".split()
NAMES = tuple(f"{first} {last}" for first in FIRST for last in LAST)
SHOTS = 2


@dataclass(frozen=True)
class PhoneBook:
    """Phone book: names with numbers, then one of the names, whose number is asked for.

    entries: of a book, at least 3."""

    # The numbers are so many and so long that scoring each of them would take a hundred times as long.
    written: ClassVar[bool] = True

    entries: int

    def __post_init__(self) -> None:
        if not SHOTS < self.entries <= len(NAMES):
            raise UserError(f"phonebook takes {SHOTS + 1} to {len(NAMES)} entries, not {self.entries}")

    def questions(self, n: int, seed: int) -> list[Question]:
        rng = random.Random(f"phonebook {self.entries} {seed}")
        return [self._question(rng) for _ in range(n)]

    def _question(self, rng: random.Random) -> Question:
        names = rng.sample(NAMES, self.entries)
        numbers = rng.sample(range(6 * 10**9, 10**10), self.entries)
        lines = [f"{name}: {number}\n" for name, number in zip(names, numbers, strict=True)]
        prompt, spans = with_spans("", lines)
        *shown, last = rng.sample(range(self.entries), SHOTS + 1)
        prompt += "\n" + "".join(lines[i] for i in shown) + f"\n{names[last]}:"
        return Question(prompt, tuple(f" {number}" for number in numbers), last, tuple(spans), last)


PROBES = {"phonebook": PhoneBook}
