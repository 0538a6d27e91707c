"""Keys that the built-in base has never seen as words: what it and the demo's hybrid retrieve from such dictionaries.

    python -m tools.foreign_words runs/demo

The dictionaries are those of the demo's unseen keys, with other words in their places: WORDS, none of which is in the world
that the base was trained on, or the same words with a capital letter. It writes recipes/foreign-words.json, from which
tools/fill_pages.py fills docs/evidence/demo.md.
"""

import argparse
import random
import re
from pathlib import Path

from surgery import load
from surgery.probes.kv import KVRetrieval
from surgery.probes.question import Question
from surgery.probes.scoring import answer
from surgery.records.record import Environment, Sealed, environment
from surgery.statistics import Proportion, share_right
from surgery.world.text import document
from surgery.world.words import KEYS, key_words

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "recipes" / "foreign-words.json"
PAIRS, QUESTIONS, SEED = (16, 64), 200, 0
WORDS = """
    acid bacon cable dairy eagle falcon gallon hazard insect jungle kernel lizard mantle napkin oxygen parcel quartz
    razor salmon tractor urchin velvet walnut yogurt zipper alley banjo cactus dragonfly elbow fiddle goblin hatchet
    igloo jelly kayak lobster mustard nectar otter paddle quiver raisin sandal tiger umpire violin wagon yacht zebra
    almond bishop canyon dentist engraver ferret ginger hockey iris jaguar kiosk lawyer muffin noodle
""".split()  # fmt: skip


class ForeignWords(Sealed, Environment):
    """accuracy: "base" or "hybrid" -> "unseen", "foreign" or "capitals" -> pairs -> how many were right."""

    seed: int
    words: tuple[str, ...]
    accuracy: dict[str, dict[str, dict[str, Proportion]]]


def with_words(question: Question, words: dict[str, str]) -> Question:
    """The question with other keys."""
    prompt = re.sub(r"^(\w+)(?=:)|(?<=')(\w+)(?=' is$)", lambda m: words[m[0]], question.prompt, flags=re.M)
    return Question(prompt, question.choices, question.answer)


def world() -> set[str]:
    """The words of texts like those that the base was trained on, and of its dictionaries."""
    rng = random.Random(SEED)
    texts = " ".join(document(rng, held_out=bool(number % 2)) for number in range(2_000))
    return {*re.findall(r"\w+", texts.lower()), *KEYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    known = key_words("unseen", 64)
    if shared := world() & {*WORDS}:
        raise SystemExit(f"not foreign: {', '.join(sorted(shared))}")
    kinds = {
        "unseen": {word: word for word in known},
        "foreign": dict(zip(known, WORDS, strict=True)),
        "capitals": {word: word.capitalize() for word in known},
    }
    accuracy: dict[str, dict[str, dict[str, Proportion]]] = {}
    for name, place in (("base", ROOT / "checkpoints" / "tiny-mamba2"), ("hybrid", run / "hybrid")):
        loaded = load(str(place))
        for kind, words in kinds.items():
            for pairs in PAIRS:
                asked = [with_words(each, words) for each in KVRetrieval(pairs, "unseen").questions(QUESTIONS, SEED)]
                right = share_right(answer(loaded.model, loaded.tokenizer, asked).correct)
                accuracy.setdefault(name, {}).setdefault(kind, {})[str(pairs)] = right
    record = ForeignWords(**environment().model_dump(), seed=SEED, words=tuple(WORDS), accuracy=accuracy)
    RECORD.write_text(record.text())


if __name__ == "__main__":
    main()
