"""What docs/evidence/ways.md says of the ways of choosing heads: from the record of the study `ways`."""

from collections.abc import Mapping
from pathlib import Path

from surgery.evaluation import markdown
from surgery.evaluation.results import HITS as HIT_TOKENS
from surgery.evaluation.results import value
from surgery.statistics import Proportion
from surgery.studies import Findings
from surgery.studies.study import Row
from surgery.studies.ways import (
    BASE,
    CHANGE,
    DEFAULT,
    HEADS,
    HITS,
    OF,
    SEEN,
    UNSEEN,
    Ways,
    agreement,
    beside_default,
    gain,
)
from tools import fresh_bases as fresh
from tools.recall import CACHED
from tools.recall_places import RecallPlaces

SHARE = 0.75
RECIPES = Path(__file__).parent.parent / "recipes"


def findings(name: str = "ways") -> Findings:
    return Findings.read(RECIPES / f"{name}.findings.json", unsealed="refuse")


def ways() -> str:
    """The built-in bases."""
    return _page("ways")


def ways_cohort() -> str:
    """The cohort's."""
    return _page("ways-cohort")


def ways_prose() -> str:
    """The base that has to recall, with what a cache of n-grams saves there."""
    places = RecallPlaces.read(RECIPES / "recall-places.json", unsealed="refuse")
    rows = "512"
    saved = -places.change[CACHED][rows][HIT_TOKENS].mean.value
    return (
        f"{_page('ways-prose')}\n\nFor comparison: a cache of n-grams, untrained, saves {saved:.3f} nats on recall hits of "
        f"six novels, these among them, in rows of as many tokens ({rows}; `recipes/recall-places.json`)."
    )


def _page(name: str) -> str:
    """All bases together, each base, and what the ways have in common."""
    record = findings(name)
    origin, recipe = record.provenance, record.provenance.recipe or {}
    by_name = {row.what: row for row in record.rows}
    order = [line.partition(":")[0] for line in record.summary.splitlines()]
    columns = [
        (base, count) for base, about in record.about.items() for count in sorted(next(iter(about["sites"].values())), key=int)
    ]
    prose = any("texts" in about for about in record.about.values())
    header = ["gain, by base and number of heads", *(f"{base}, {count}" for base, count in columns)]
    before, figure = ("loss of the base, nats", HITS) if prose else ("accuracy of the base", UNSEEN)
    body = [[before, *(f"{value(by_name[f'{base}{OF}{BASE}'].figures[figure]):.3f}" for base, _ in columns)]]
    for way in order:
        rows = [by_name.get(f"{base}{OF}{way}, {count}{HEADS}") for base, count in columns]
        body.append([way, *("" if row is None else _marked(record, row) for row in rows)])
    alike = [
        [way, *(f"{share:.0%}" for share in agreement(record.about, way, DEFAULT))] for way in order if way != DEFAULT
    ]  # fmt: skip
    if prose:
        (texts,) = (about["texts"] for about in record.about.values())
        measured = f"{len(texts)} novels, {recipe['bench']['limit']} rows of each, a novel is a unit"
        gains = "Nats saved on recall hits, the mean over novels"
    else:
        sizes = {about["size"] for about in record.about.values()}
        differ = len(sizes) > 1
        each = ", ".join(f"{base} {about['size']}" for base, about in record.about.items())
        measured = f"{recipe['bench']['limit']} dictionaries of {'pairs: ' + each if differ else f'{sizes.pop()} pairs'}"
        gains = "Gain in accuracy on dictionaries with keys not used in tuning"
    seeds = ", ".join(sorted({str(about["seeds"]) for about in record.about.values()}))
    first = next(iter(record.about.values()))["sites"]
    draws = [f"{way} {len(drawn)}" for way in order for drawn in [*first[way].values()][:1] if len(drawn) > 1]
    drawn = f"; draws, each tuned with one of the seeds: {', '.join(draws)}" if draws else ""
    return "\n\n".join(
        [
            markdown.table(*Ways.table(record)),
            f"{gains}; the mean over the bases that were measured with so many heads. Cost: for the largest number of heads, "
            "ranking included. A pass is one sequence through all layers; seconds are of the processor.",
            f"![{Ways.title}](../../recipes/{name}.png)",
            markdown.table(header, body),
            f"`+` and `-`: better or worse than `{DEFAULT}`, by the paired 95% interval and with each seed of tuning.",
            markdown.table([f"chooses as {DEFAULT} does", "heads", "layers"], alike),
            f"{measured}. {recipe['tune']['steps']} steps of tuning, {seeds} seeds{drawn}. "
            f"Measured {origin.created[:10]} on {origin.machine}, version {origin.toolkit}, seed {origin.seed} "
            f"(`recipes/{name}.findings.json`).",
        ]
    )


def _marked(record: Findings, row: Row) -> str:
    sign = beside_default(record.about, row)
    return f"{gain(row.figures):+.3f}" + {1: " +", -1: " -"}.get(sign or 0, "")


def kept_unseen() -> str:
    """What of the gain is left with keys that tuning did not use, with the heads that attribution names and no adapters."""
    body, shares = [], []
    for name in ("ways", "ways-cohort"):
        record = findings(name)
        for base in record.about:
            for row in (row for row in record.rows if row.what.startswith(f"{base}{OF}attribution, ")):
                seen, unseen = (row.figures[each + CHANGE] for each in (SEEN, UNSEEN))
                gains = seen.ci95[0] > 0
                shares += [value(unseen) / value(seen)] if gains else []
                heads = row.what.rpartition(", ")[2].removesuffix(HEADS)
                share = f"{shares[-1]:.2f}" if gains else ""
                body.append([base, heads, f"{value(seen):+.3f}", f"{value(unseen):+.3f}", share])
    kept = sum(share >= SHARE for share in shares)
    told = f"In {kept} of {len(shares)} cases that gain (by the interval) at least three quarters of the gain are left."
    return "\n\n".join([told, markdown.table(["base", "heads", "keys of the examples", "unseen keys", "share"], body)])


def fresh_bases() -> str:
    """Bases with seeds that were never used before: the run that chooses its recipe beside recipes that were set by hand."""
    record = fresh.FreshBases.read(fresh.RECORD, unsealed="refuse")
    header = ["base, seed", "recipe", "64 pairs", "unseen keys", "knowledge", "best control", "plan"]
    body: list[list[str]] = []
    for name, base in record.bases.items():
        first = f"{name}, {base.seed}"
        if not base.runs:
            body.append([first, "declined: it does not retrieve", *[""] * 5])
            continue
        body.append([first, "the base", *_cells(base.figures), "", ""])
        for recipe, run in base.runs.items():
            called = "`surgery run MODEL`" if recipe == fresh.CHOSEN else f"`recipes/{recipe}.yaml`"
            control = "" if run.control is None else f"{run.control.accuracy:.3f}"
            body.append(["", called, *_cells(run.figures), control, run.plan])
    chosen_ones = {name: base.runs for name, base in record.bases.items() if base.runs}
    behind = {name: fresh.behind_hand_set(runs) for name, runs in chosen_ones.items()}
    most = max(max(0.0, *each.values()) for each in behind.values())
    return "\n\n".join(
        [
            markdown.table(header, body),
            f"On {len(chosen_ones)} bases `surgery run MODEL`, with nothing set, is behind the best hand-set recipe by at most "
            f"{most:.3f}, with keys that tuning used and with others. {fresh.LIMIT} questions a cell, 64 pairs; best control: "
            f"with keys that tuning used. Measured {record.created[:10]} on {record.machine}, version {record.toolkit} "
            "(`recipes/fresh-bases.json`, `python -m tools.fresh_bases`).",
        ]
    )


def _cells(figures: Mapping[str, Proportion]) -> list[str]:
    return [f"{figures[task].accuracy:.3f}" if task in figures else "" for task in (fresh.SEEN, fresh.UNSEEN, "knowledge")]
