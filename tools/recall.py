"""What is recalled of prose, novel by novel: by the base, by grafts that copy, untrained, and by a cache of n-grams.

    python -m tools.recall FOLDER

FOLDER holds books/ as recipes/books.yaml names it. Three kinds of tokens are measured on novels by authors of whom the base
has read nothing: repeated rare bigrams, rare tokens that occurred before but never behind the same token, of which the cache
knows nothing, and all. A novel is a unit: the intervals are over novels, and say where a further one lies. The shares of the
cache are those of recipes/copy-cache.json. It writes recipes/recall.json, from which tools/fill_pages.py fills
docs/evidence/text.md.
"""

import argparse
import os
from pathlib import Path

import numpy as np

from surgery import load
from surgery.evaluation.report import Report
from surgery.evaluation.results import HITS
from surgery.evaluation.suites.hits import ChosenTokens, hit_texts
from surgery.probes.hits import GAP, NONE, PairCounts
from surgery.records.recipe import read_recipe
from surgery.records.record import Environment, Sealed, environment
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt, splice
from surgery.statistics import OverDocuments, over_documents
from surgery.tuning.rare_pairs import training_pairs
from tools.copy_cache import ROOT, CopyCache, base_losses, mixed

RECORD = ROOT / "recipes" / "recall.json"
NOVELS = (
    "Stephen Crane - The Red Badge of Courage ",
    "Thomas Hardy - Far from the Madding Crowd",
    "Thomas Hardy - Jude the Obscure",
    "Thomas Hardy - Tess of the d'Urbervilles",
    "Thomas Hardy - The Mayor of Casterbridge",
    "Thomas Hardy - The Return of the Native",
)
RARE = 100.0  # tokens, in a million; of 4,096 tokens one occurs 244 times on average
LENGTH, WINDOWS = 1_024, 32  # tokens of a row, and windows of bench.window tokens of a novel
APART, ALL = "apart", "all"
BASE, COPYING, CACHED = "base", "copying grafts, untrained", "copy cache, untrained"


class Recall(Sealed, Environment):
    """rare: how often a token that is recalled may occur in a million of the text that tuning reads. tokens: novel -> kind ->
    how many. loss: model -> novel -> kind -> nats per token. change: model -> kind -> the difference to the base."""

    seed: int
    length: int
    rare: float
    grafts: str
    tokens: dict[str, dict[str, int]]
    loss: dict[str, dict[str, dict[str, float]]]
    change: dict[str, dict[str, OverDocuments]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    settings = [f"model={ROOT / 'checkpoints' / 'tiny-books'}", f"bench.contexts=[{LENGTH}]", f"bench.windows={WINDOWS}"]
    recipe = read_recipe(ROOT / "recipes" / "books.yaml", settings)
    plan = Report.read(ROOT / "recipes" / "books.report.json", unsealed="refuse").plan
    weights = CopyCache.read(ROOT / "recipes" / "copy-cache.json", unsealed="refuse").shares
    assert plan is not None
    os.chdir(folder)  # the recipe names its texts from there
    loaded = load(recipe.model, dtype=recipe.dtype)
    models = {BASE: adopt(loaded.model), COPYING: splice(loaded.model, plan)}
    counts = training_pairs(loaded.tokenizer, recipe.data)
    tokens: dict[str, dict[str, int]] = {}
    loss: dict[str, dict[str, dict[str, float]]] = {name: {} for name in (BASE, COPYING, CACHED)}
    for novel in NOVELS:
        data = recipe.data.model_copy(update={"held_out_text": f"books/valid/{novel}.txt"})
        text = hit_texts(recipe.bench, loaded.tokenizer, data, recipe.seed)[f"{HITS}.{LENGTH}"]
        by_kind = kinds(text, seen_apart(text.rows.ids.numpy(), counts, RARE))
        tokens[novel] = {kind: int(chosen.sum()) for kind, chosen in by_kind.items()}
        losses = {name: base_losses(model, recipe, text) for name, model in models.items()}
        losses[CACHED] = mixed(losses[BASE], text.rows.ids.numpy(), {int(order): share for order, share in weights.items()})
        for name, each in losses.items():
            loss[name][novel] = {kind: float(each[chosen].mean()) for kind, chosen in by_kind.items()}
        say(f"{novel}: " + "; ".join(f"{name} {loss[name][novel][APART]:.3f}" for name in loss))
    change = {
        name: {
            kind: over_documents(np.array([loss[name][novel][kind] - loss[BASE][novel][kind] for novel in NOVELS]))
            for kind in (HITS, APART, ALL)
        }
        for name in (COPYING, CACHED)
    }
    record = Recall(
        **environment().model_dump(), seed=recipe.seed, length=LENGTH, rare=RARE,
        grafts="; ".join(map(str, plan.sites)), tokens=tokens, loss=loss, change=change,
    )  # fmt: skip
    RECORD.write_text(record.text())


def seen_apart(rows: np.ndarray, counts: PairCounts, rare: float, *, gap: int = GAP) -> np.ndarray:
    """(rows, t) bool: tokens to be recalled without a bigram. Each occurs in its row at least `gap` tokens before as well, at
    most `rare` times per million tokens in the text of `counts`, and never before behind the token that it is behind now.
    A cache of n-grams knows nothing of it."""
    rows = np.asarray(rows, dtype=np.int64)
    often = counts.token_counts(int(rows.max()) + 1) > rare * counts.tokens / 1e6
    found = np.zeros(rows.shape, dtype=bool)
    for number, row in enumerate(rows.tolist()):
        first: dict[int, int] = {}
        pairs: set[tuple[int, int]] = set()
        for place, token in enumerate(row):
            pair = (row[place - 1], token) if place else (NONE, token)
            before = first.setdefault(token, place)
            found[number, place] = place - before >= gap and not often[token] and place > 0 and pair not in pairs
            pairs.add(pair)
    return found


def kinds(text: ChosenTokens, apart: np.ndarray) -> dict[str, np.ndarray]:
    """By kind which tokens behind each row's first, (rows, t - 1) bool."""
    repeated = text.chosen[:, 1:]
    return {HITS: repeated, APART: apart[:, 1:], ALL: np.ones_like(repeated)}


if __name__ == "__main__":
    main()
