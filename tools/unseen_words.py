"""Do keys and forms that stand in no training example gain what those of the examples gain? On the cohort's bases.

    python -m tools.unseen_words COHORT FOLDER

COHORT is the folder of a run of recipes/cohort.yaml, whose bases are used; FOLDER takes what is measured, and what is there
already is not measured again. The same grafts are tuned on two kinds of examples: dictionaries of 64 words in one form, as all
recipes have them, and dictionaries of many kinds of keys in several forms. Each is tuned alone, with adapters, and with
adapters for longer; adapters without a graft are tuned as long. What is asked are dictionaries of 64 pairs: with keys of the
examples, with words that no example holds (which the base knows), with words that the base does not know, and in other forms,
two of which stand in no example of either kind. It writes recipes/unseen-words.json, from which tools/fill_pages.py fills
docs/evidence/cohort.md.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import surgery
from surgery.evaluation import markdown
from surgery.loading.opened import Checkpoint
from surgery.probes.kv import MOST_PAIRS, OPENING, ask, dictionary
from surgery.probes.question import Question, with_spans
from surgery.probes.scoring import answer
from surgery.records.plan import Plan
from surgery.records.recipe import Data, Lesson, Lora, Tune
from surgery.records.record import Environment, Sealed, environment
from surgery.runtime.ownership.files import writing
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt, splice
from surgery.statistics import Proportion, share_right
from surgery.tuning import batches
from surgery.tuning.sequences import Piece, entry_pieces
from surgery.tuning.trainable import with_own_mixers
from surgery.world.words import KEYS, Keys, key_words
from tools.foreign_words import WORDS

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "recipes" / "unseen-words.json"
BASES = ("four-layers", "two-layers", "wide", "narrow", "state-32")  # Mamba-2, that answer a sixth of 64 pairs or more
PAIRS, QUESTIONS, SEED = 64, 150, 60
STEPS, LONG = 150, 600
HEADS, BLEND = 4, 0.25
BASE, FIXED, VARIED, UNTRAINED = "base", "64 words, one form", "many words and forms", "untrained"
ADAPTERS, LONGER, ALONE = ", adapters", f", {LONG} steps", ", adapters without a graft"
TUNED = tuple(kind + how for kind in (FIXED, VARIED) for how in ("", ADAPTERS, ADAPTERS + LONGER, ALONE + LONGER))
FORMS: dict[str, Callable[[str, str], str]] = {
    "key:value": lambda key, value: f"{key}:{value}\n",
    "key=value": lambda key, value: f"{key}={value}\n",
    "- key:value": lambda key, value: f"- {key}:{value}\n",
    "The key has value.": lambda key, value: f"The {key} has {value}.\n",
    "key->value": lambda key, value: f"{key}->{value}\n",
    "(key,value)": lambda key, value: f"({key},{value})\n",
}
PLAIN, *OTHERS = FORMS
TAUGHT = (PLAIN, *OTHERS[:3])  # in the examples of many forms
SHARE = 0.75  # of the gain, which unseen keys should have
SEEN, UNSEEN, UNKNOWN = "keys of the examples", "unseen keys", "unknown words"
CELLS = (SEEN, UNSEEN, UNKNOWN, *OTHERS)  # other forms are asked with unseen keys


class UnseenWords(Sealed, Environment):
    """steps: of tuning, and of the longer one. plans: base -> its heads. accuracy: base -> model -> what is asked -> how many
    were right."""

    seed: int
    pairs: int
    steps: tuple[int, int]
    plans: dict[str, tuple[str, ...]]
    accuracy: dict[str, dict[str, dict[str, Proportion]]]


class Measured(Sealed):
    """Of one base."""

    plan: tuple[str, ...]
    accuracy: dict[str, dict[str, Proportion]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    with writing(options.folder):
        measured = {name: _measured(options.cohort / "bases" / name, options.folder / f"{name}.json") for name in BASES}
    record = UnseenWords(
        **environment().model_dump(), seed=SEED, pairs=PAIRS, steps=(STEPS, LONG),
        plans={name: each.plan for name, each in measured.items()},
        accuracy={name: each.accuracy for name, each in measured.items()},
    )  # fmt: skip
    RECORD.write_text(record.text())


def _measured(folder: Path, file: Path) -> Measured:
    """Of the models that the file has, none is measured again."""
    base = surgery.load(str(folder))
    ranking = surgery.locate(base, options={"pairs": 32}, examples=64, exact=False, layers=False, seed=SEED)
    plan = surgery.plan(ranking, heads=HEADS, blend=BLEND)
    asked = {cell: _questions(cell) for cell in CELLS}
    accuracy = Measured.read(file, unsealed="refuse").accuracy if file.exists() else {}

    def model_of(name: str) -> PreTrainedModel:
        if name == BASE:
            return base.model
        return splice(base.model, plan).eval() if name == UNTRAINED else _tuned(base, plan, name, f"{folder.name}, {name}")

    for name in (BASE, UNTRAINED, *TUNED):
        if name not in accuracy:
            model = model_of(name)
            right = {cell: share_right(answer(model, base.tokenizer, of).correct) for cell, of in asked.items()}
            say(f"{folder.name}, {name}: " + "; ".join(f"{cell} {each.accuracy:.3f}" for cell, each in right.items()))
            accuracy[name] = right
            Measured(plan=tuple(map(str, plan.sites)), accuracy=accuracy).write(file)
    return Measured(plan=tuple(map(str, plan.sites)), accuracy={name: accuracy[name] for name in (BASE, UNTRAINED, *TUNED)})


def _tuned(base: Checkpoint, plan: Plan, name: str, description: str) -> PreTrainedModel:
    """The model that TUNED calls so."""
    kind = VARIED if name.startswith(VARIED) else FIXED
    options = Tune(
        learning_rate=2e-3, lessons=(Lesson(probe="kv", options={"pairs": (16, 64)}),), batch_size=4, text_batch_size=2,
        kl_weight=4.0, steps=LONG if name.endswith(LONGER) else STEPS,
        lora=Lora(target_modules=("in_proj", "out_proj")) if ADAPTERS in name else None,
    )  # fmt: skip
    alone = ALONE in name
    model = with_own_mixers(base.model, []) if alone else splice(base.model, plan)
    with examples(kind, base.tokenizer):
        surgery.tune(
            model, base.tokenizer, options, data=Data(skills=()), seed=SEED, layers=[] if alone else None,
            teacher=adopt(base.model) if alone else None, description=description,
        )  # fmt: skip
    return model.eval()


def _questions(cell: str) -> list[Question]:
    """The same numbers and places in all cells."""
    rng = random.Random(f"unseen words {SEED}")
    keys: Keys = "lessons" if cell == SEEN else "unseen"
    instead = dict(zip(key_words("unseen", PAIRS), WORDS, strict=True)) if cell == UNKNOWN else {}
    form = FORMS[cell] if cell in FORMS else FORMS[PLAIN]
    questions = []
    for _ in range(QUESTIONS):
        entries = {instead.get(key, key): value for key, value in dictionary(rng, PAIRS, keys).items()}
        prompt, spans = with_spans(OPENING, (form(key, value) for key, value in entries.items()))
        place = rng.randrange(PAIRS)
        prompt += ask([*entries][place])
        questions.append(Question(prompt, tuple(entries.values()), place, tuple(spans), place))
    return questions


@contextmanager
def examples(kind: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """What tuning's dictionaries are made of."""
    before = batches.kv_pieces
    if kind == VARIED:
        batches.kv_pieces = partial(varied_pieces, words_of(tokenizer))
    try:
        yield
    finally:
        batches.kv_pieces = before


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The words of the vocabulary, each one token at the beginning of a line, but for those that bench asks for."""
    unseen = {*KEYS[1::2]}
    # ASCII alone: the marks of a byte-level vocabulary are letters, too.
    return sorted(
        word
        for word in tokenizer.get_vocab()
        if word.isascii() and word.isalpha() and len(word) > 2 and word.lower() not in unseen
    )


def varied_pieces(words: list[str], rng: random.Random, pairs: int, queries: int) -> list[Piece]:
    """As tuning's own, with keys of all kinds of one row: words, capitalised words, two words, or numbers; in one of several
    forms."""
    kinds: list[Callable[[], str]] = [
        lambda: rng.choice(words), lambda: rng.choice(words).capitalize(), lambda: f"{rng.choice(words)} {rng.choice(words)}",
        lambda: str(rng.randrange(100, 1000)),
    ]  # fmt: skip
    kind, form = rng.choice(kinds), FORMS[rng.choice(TAUGHT)]
    keys: dict[str, None] = {}
    while len(keys) < pairs:
        keys[kind()] = None
    entries = dict(zip(keys, map(str, rng.sample(range(MOST_PAIRS), pairs)), strict=True))
    return entry_pieces(rng, entries, [form(key, value) for key, value in entries.items()], queries)


def page() -> str:
    """The means over bases, and how many of the bases keep three quarters of the gain."""
    record = UnseenWords.read(RECORD, unsealed="refuse")
    models = [name for name in next(iter(record.accuracy.values())) if name != BASE]
    header = ["gain over the base, mean of bases", *CELLS, "three quarters of the gain with unseen keys"]
    body = []
    for model in models:
        gains = {
            cell: [of[model][cell].accuracy - of[BASE][cell].accuracy for of in record.accuracy.values()] for cell in CELLS
        }
        kept = sum(
            seen > 0 and unseen >= SHARE * seen for seen, unseen in zip(gains[SEEN], gains[UNSEEN], strict=True)
        )  # fmt: skip
        body.append([model, *(f"{np.mean(gains[cell]):+.3f}" for cell in CELLS), f"{kept} of {len(record.accuracy)} bases"])
    before = [f"{np.mean([of[BASE][cell].accuracy for of in record.accuracy.values()]):.3f}" for cell in CELLS]
    body.insert(0, ["accuracy of the base", *before, ""])
    longest = VARIED + ADAPTERS + LONGER
    by_base = [
        f"{name} {of[longest][UNSEEN].accuracy:.3f} with unseen keys and {of[longest][UNKNOWN].accuracy:.3f} with unknown words"
        for name, of in record.accuracy.items()
    ]
    return "\n\n".join(
        [
            markdown.table(header, body),
            f"Base by base, {longest}: {'; '.join(by_base)}.",
            f"Dictionaries of {record.pairs} pairs, {QUESTIONS} questions a cell; other forms with unseen keys, the last two "
            f"in no example of either kind. {HEADS} leading heads by attribution behind a gate of {BLEND:g}, "
            f"{record.steps[0]} steps where nothing else is said, one seed. Bases: "
            f"{', '.join(record.accuracy)}. Measured {record.created[:10]} on {record.machine}, version {record.toolkit} "
            "(`recipes/unseen-words.json`, `python -m tools.unseen_words`).",
        ]
    )


if __name__ == "__main__":
    main()
