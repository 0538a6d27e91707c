"""The simplest rival of grafts on prose: a cache of n-grams mixed into the base's probabilities, with nothing trained.

    python -m tools.copy_cache FOLDER

FOLDER holds books/ as recipes/books.yaml names it. Where the last tokens stood in the row before (of ORDERS the most that did),
the cache says what followed there, each time with equal weight. Its share of the probability is one number an order, chosen on
two of the novels that the grafts were chosen on. It is measured where recipes/books.report.json measured the grafts, and
recipes/copy-cache.json keeps it, from which tools/fill_pages.py fills docs/evidence/text.md.
"""

import argparse
import os
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from surgery import load
from surgery.evaluation.results import HITS, OTHERS
from surgery.evaluation.suites.hits import ChosenTokens, hit_texts, rows_at_once
from surgery.probes.hits import by_stretch
from surgery.records.recipe import Recipe, read_recipe
from surgery.records.record import Environment, Sealed, environment
from surgery.runtime.progress import say
from surgery.statistics import Estimate, difference, mean, shares

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "recipes" / "copy-cache.json"
ORDERS = (1, 2, 3)  # tokens before
SHARES = np.linspace(0, 0.95, 96)
FITTED = 2_048  # tokens of the rows on which the shares are chosen


class CopyCache(Sealed, Environment):
    """shares: of the probability that the cache gets where so many tokens were found before ("1", "2", "3"). chosen_on: the
    texts. base, cached: by task, nats per token. change: by task, the paired difference; `all` are all tokens."""

    novel: str
    seed: int
    shares: dict[str, float]
    chosen_on: tuple[str, ...]
    base: dict[str, Estimate]
    cached: dict[str, Estimate]
    change: dict[str, Estimate]


def cache(row: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of every token but the first: (how many tokens before it were found earlier in the row, what the cache gives it)."""
    followed: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    orders, given = np.zeros(len(row) - 1, dtype=int), np.zeros(len(row) - 1)
    for at in range(1, len(row)):
        for order in ORDERS:
            context = tuple(row[max(0, at - order) : at])
            if len(context) == order and (seen := followed.get(context)):
                orders[at - 1], given[at - 1] = order, seen[row[at]] / seen.total()
        for order in ORDERS:
            if at >= order:
                followed[tuple(row[at - order : at])][row[at]] += 1
    return orders, given


def mixed(losses: np.ndarray, rows: np.ndarray, weights: dict[int, float]) -> np.ndarray:
    """The losses (rows, t - 1) with the cache mixed in."""
    each = [cache(row.tolist()) for row in rows]
    orders, given = (np.stack(part) for part in zip(*each, strict=True))
    share = np.vectorize(lambda order: weights.get(int(order), 0.0), otypes=[float])(orders)
    return -np.log((1 - share) * np.exp(-losses) + share * given)


def base_losses(model: PreTrainedModel, recipe: Recipe, text: ChosenTokens) -> np.ndarray:
    """(rows, t - 1)"""
    count, length = text.rows.ids.shape
    return text.rows.losses(model, rows_at_once(recipe.bench, length, count), text)[0]


def chosen_shares(model: PreTrainedModel, recipe: Recipe, tokenizer: object, texts: tuple[str, ...]) -> dict[int, float]:
    """Of each order the share under which all tokens that it speaks of lose least."""
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {order: [] for order in ORDERS}
    for text in texts:
        data = recipe.data.model_copy(update={"held_out_text": text})
        bench = recipe.bench.model_copy(update={"contexts": (FITTED,)})
        chosen = hit_texts(bench, tokenizer, data, recipe.seed)[f"{HITS}.{FITTED}"]  # type: ignore[arg-type]
        probability = np.exp(-base_losses(model, recipe, chosen))
        for row, known in zip(chosen.rows.ids.tolist(), probability, strict=True):
            orders, given = cache(row)
            for order in ORDERS:
                found[order].append((known[orders == order], given[orders == order]))
    result = {}
    for order, pairs in found.items():
        known, given = (np.concatenate(part) for part in zip(*pairs, strict=True))
        losses = [-np.log((1 - share) * known + share * given).mean() for share in SHARES]
        result[order] = float(SHARES[int(np.argmin(losses))])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    recipe = read_recipe(ROOT / "recipes" / "books.yaml", [f"model={ROOT / 'checkpoints' / 'tiny-books'}"])
    os.chdir(folder)  # the recipe names its texts from there
    loaded = load(recipe.model, dtype=recipe.dtype)
    sources = recipe.locate.options["source"][:2]
    weights = chosen_shares(loaded.model, recipe, loaded.tokenizer, tuple(sources))
    say(f"shares of the cache: {weights}")
    base: dict[str, np.ndarray] = {}
    cached: dict[str, np.ndarray] = {}
    for name, text in hit_texts(recipe.bench, loaded.tokenizer, recipe.data, recipe.seed).items():
        family, _, length = name.partition(".")
        losses = base_losses(loaded.model, recipe, text)
        both = losses, mixed(losses, text.rows.ids.numpy(), weights)
        for kept, each in zip((base, cached), both, strict=True):
            kept[name] = shares(by_stretch(each * text.chosen[:, 1:], text.stretch), text.counts())
            if family == OTHERS:
                kept[f"all.{length}"] = shares(by_stretch(each, text.stretch), by_stretch(np.ones_like(each), text.stretch))
        say(f"{name}: {base[name].mean():.3f}, with the cache {cached[name].mean():.3f}")
    record = CopyCache(
        **environment().model_dump(), novel=Path(recipe.data.held_out_text).stem, seed=recipe.seed,
        shares={str(order): share for order, share in weights.items()}, chosen_on=tuple(Path(text).stem for text in sources),
        base={name: mean(values) for name, values in base.items()},
        cached={name: mean(values) for name, values in cached.items()},
        change={name: difference(values, cached[name]) for name, values in base.items()},
    )  # fmt: skip
    RECORD.write_text(record.text())


if __name__ == "__main__":
    main()
