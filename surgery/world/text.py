"""Documents of the small world, training and held out.

A training document mixes narrative sentences with facts in their training templates. A held-out document is made of
narrative sentences that no training document contains (sentences are split by a hash of their text) and of facts in their
held-out templates.
"""

import random
import zlib

from surgery.world.facts import PEOPLE, facts

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


def _sentence(rng: random.Random, held_out: bool) -> str:
    while True:
        p, q = rng.sample(PEOPLE, 2)
        sentence = rng.choice(SHAPES).format(
            p=p, q=q, time=rng.choice(TIMES), place=rng.choice(PLACES), verb=rng.choice(VERBS),
            adj=rng.choice(ADJECTIVES), thing=rng.choice(THINGS), mood=rng.choice(MOODS),
        )  # fmt: skip
        if (zlib.crc32(sentence.encode()) % 8 == 0) == held_out:
            return sentence


def _fact_sentence(rng: random.Random, held_out: bool) -> str:
    fact = rng.choice(facts())
    templates = [fact.held_out_template] if held_out else [i for i in range(4) if i != fact.held_out_template]
    return f"{fact.prompt(rng.choice(templates))} {fact.value}."


def document(rng: random.Random, *, held_out: bool, sentences: int = 12, facts_share: float = 0.5) -> str:
    """One document: sentences joined by spaces."""
    return " ".join(
        _fact_sentence(rng, held_out) if rng.random() < facts_share else _sentence(rng, held_out) for _ in range(sentences)
    )
