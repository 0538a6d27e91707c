"""Facts about a hundred invented people, and the ways to state and to ask them.

Each fact (person, relation -> value) can be stated by four templates. One of the four is held out *per fact*: it never
occurs in training for that fact, although it does for others, so that a correct answer shows knowledge and not a copied
sentence. The facts themselves are drawn once, from a fixed seed: they are the world, not a sample of it.
"""

import random
import zlib
from dataclasses import dataclass
from functools import cache

PEOPLE = tuple(
    first + last
    for first in "Ba Ko Li Mu Ne Ra Si To Ve Zo".split()
    for last in "rin dal mek las nor pia sha tun vek wen".split()
)

# relation -> (question, possible values, templates: the words before the value)
RELATIONS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "pet": (
        "What is the pet of {p}?",
        tuple("cat dog fox hen owl goat horse crow mouse toad duck sheep".split()),
        ("At home {p} feeds the", "Everyone knows that {p} owns the", "Every day {p} walks the", "In the yard {p} keeps the"),
    ),
    "color": (
        "What is the color of {p}?",
        tuple("red blue green black white yellow purple brown grey pink".split()),
        ("On feast days {p} wears", "In every game {p} chooses", "For the door {p} wanted", "Above all {p} loves"),
    ),
    "town": (
        "What is the town of {p}?",
        tuple("Arden Bexley Corwen Dunmore Elstow Farley Glenholm Hexham Ilford Kelso Lorne Marston".split()),
        ("As a child {p} lived in", "These days {p} sleeps in", "Every year {p} returns to", "By night {p} rode to"),
    ),
    "trade": (
        "What is the trade of {p}?",
        tuple("baker miller tailor painter sailor farmer weaver mason doctor potter hunter singer".split()),
        ("For a living {p} works as a", "At school {p} trained as a", "By the end {p} became a", "The guild named {p} a"),
    ),
    "dish": (
        "What is the dish of {p}?",
        tuple("soup bread fish rice stew cake pie beans porridge cabbage eggs noodles".split()),
        ("For supper {p} cooks", "At the fair {p} sells", "On a cold day {p} eats", "For guests {p} serves"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    person: str
    relation: str
    value: str
    held_out_template: int

    @property
    def question(self) -> str:
        return RELATIONS[self.relation][0].format(p=self.person)

    @property
    def choices(self) -> tuple[str, ...]:
        return RELATIONS[self.relation][1]

    def prompt(self, template: int) -> str:
        return RELATIONS[self.relation][2][template].format(p=self.person)


@cache
def facts() -> tuple[Fact, ...]:
    """All 500 facts, the same in every process."""
    rng, out = random.Random("small world, facts"), []
    for person in PEOPLE:
        for relation, (_, values, templates) in RELATIONS.items():
            digest = zlib.crc32(f"{person} {relation}".encode())
            out.append(Fact(person, relation, rng.choice(values), digest % len(templates)))
    return tuple(out)
