"""The built-in toy data: a generated language whose text and facts train and test the built-in models.

What is drawn depends on the seed alone and never changes, because records and checkpoints rest on it.
"""

import random
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

from surgery.errors import UserError

Keys = Literal["all", "seen", "unseen"]
"""Which words may be keys: all, those that training examples may hold, or those that only bench asks for."""

# The 128 common words that serve as keys, of probes and of training examples.
KEYS = tuple(
    """
    anchor apple arrow badge basket beacon bell bird blanket board boat bone book bottle bowl branch brick bridge broom
    brush bucket button cabin candle carpet castle chain chair chalk cheese circle clock cloud coin collar column copper
    corner cotton cradle crown curtain desk diamond dollar donkey door dragon drawer drum engine fabric feather fence field
    finger flag flame flour flower forest fork fountain garden gate giant glass glove grain hammer harbor helmet hill honey
    horn island jacket kettle kitten ladder lake lantern leaf lemon letter magnet map marble market meadow mirror monkey
    moon motor mountain nail needle ocean olive onion orange oven paper pencil pepper pillow planet plate pocket potato
    rabbit ribbon river rocket saddle sand shadow shovel silver spoon statue stone table temple thunder ticket tower tunnel
    """.split()
)

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
}

TIMES = (
    "In the morning|At noon|In the evening|Before dawn|After the rain|Last winter|One day|In the spring|On market day|"
    "At midnight"
).split("|")
PLACES = (
    "the mill|the inn|the old bridge|the harbor|the church|the well|the forest|the school|the market|the tower|the meadow|"
    "the north gate"
).split("|")
VERBS = "found|sold|painted|lost|carried|mended|hid|borrowed|cleaned|broke|bought|dropped".split("|")
ADJECTIVES = "small|heavy|wooden|silver|broken|shiny|strange|old|new|round|empty|golden".split("|")
THINGS = "lamp|basket|chair|barrel|ring|flute|ladder|kettle|mirror|drum|blanket|key|cart|boat|knife".split("|")
MOODS = "smiled|slept|laughed|wept|sang|waited|went home|told no one|asked for help|began to run".split("|")
SHAPES = (
    "{time} {p} {verb} a {adj} {thing} near {place}.",
    "{p} went to {place} with {q} and {verb} the {adj} {thing}.",
    "{time} the {adj} {thing} of {p} was at {place}.",
    "When {p} came to {place}, {q} {mood}.",
    "{q} saw that {p} {verb} a {thing} and {mood}.",
    "{time} {p} {mood}, because the {thing} was {adj}.",
)


def key_words(keys: Keys, count: int) -> tuple[str, ...]:
    """The words that may be keys. Raises UserError if there are fewer than `count`."""
    chosen = {"all": KEYS, "seen": KEYS[::2], "unseen": KEYS[1::2]}[keys]
    if count > len(chosen):
        raise UserError(f"{count} different words are needed, and keys '{keys}' are {len(chosen)}; take a smaller size")
    return chosen


@dataclass(frozen=True)
class Fact:
    """A person's value of a relation. Four templates state it; one of them, another for each fact, is held out of training for
    this fact, so that a right answer shows knowledge and not a copied sentence."""

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

    def templates(self, held_out: bool) -> list[int]:
        """The templates of one split."""
        return [i for i in range(4) if (i == self.held_out_template) == held_out]

    def prompt(self, template: int) -> str:
        """A sentence up to the value."""
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


def is_held_out(text: str) -> bool:
    """Whether a text belongs to the split that training never shows: one of eight, by a hash."""
    return zlib.crc32(text.encode()) % 8 == 0


def document(rng: random.Random, *, held_out: bool, sentences: int = 12) -> str:
    """A document of sentences, joined by spaces.

    One for training mixes narrative sentences with facts in their training templates. A held-out one is made of narrative
    sentences that no training document contains and of facts in their held-out templates.
    """
    told = []
    for _ in range(sentences):
        if rng.random() < 0.5:
            fact = rng.choice(facts())
            told.append(f"{fact.prompt(rng.choice(fact.templates(held_out)))} {fact.value}.")
            continue
        while True:  # until a sentence is of this split
            p, q = rng.sample(PEOPLE, 2)
            shape, time, place = rng.choice(SHAPES), rng.choice(TIMES), rng.choice(PLACES)
            verb, adj, thing, mood = rng.choice(VERBS), rng.choice(ADJECTIVES), rng.choice(THINGS), rng.choice(MOODS)
            sentence = shape.format(p=p, q=q, time=time, place=place, verb=verb, adj=adj, thing=thing, mood=mood)
            if is_held_out(sentence) == held_out:
                break
        told.append(sentence)
    return " ".join(told)
