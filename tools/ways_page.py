"""What docs/evidence/ways.md says of the ways of choosing heads: from the record of the study `ways`."""

from collections.abc import Mapping
from pathlib import Path

from surgery.evaluation import markdown
from surgery.evaluation.results import value
from surgery.statistics import Proportion
from surgery.studies import Findings
from surgery.studies.ways import AGAINST, BASE, CHANGE, DEFAULT, HEADS, OF, UNSEEN, Ways, agreement
from tools import fresh_bases as fresh

RECORD = Path(__file__).parent.parent / "recipes" / "ways.findings.json"


def findings() -> Findings:
    return Findings.read(RECORD, unsealed="refuse")


def ways() -> str:
    """All bases together, each base, and what the ways have in common."""
    record = findings()
    origin, recipe = record.provenance, record.provenance.recipe or {}
    figures = {row.what: row.figures for row in record.rows}
    order = [line.partition(":")[0] for line in record.summary.splitlines()]
    columns = [(base, count) for base, about in record.about.items() for count in sorted(about["sites"]["random"], key=int)]
    header = ["gain, by base and number of heads", *(f"{base}, {count}" for base, count in columns)]
    body = [["accuracy of the base", *(f"{value(figures[f'{base}{OF}{BASE}'][UNSEEN]):.3f}" for base, _ in columns)]]
    for way in order:
        cells = []
        for base, count in columns:
            of = figures.get(f"{base}{OF}{way}, {count}{HEADS}")
            mark = ""
            if of and UNSEEN + AGAINST in of:
                low, high = of[UNSEEN + AGAINST].ci95
                mark = " +" if low > 0 else " -" if high < 0 else ""
            cells.append("" if of is None else f"{value(of[UNSEEN + CHANGE]):+.3f}{mark}")
        body.append([way, *cells])
    alike = [
        [way, *(f"{share:.0%}" for share in agreement(record.about, way, DEFAULT))] for way in order if way != DEFAULT
    ]  # fmt: skip
    seeds = {about["seeds"] for about in record.about.values()}
    sizes = ", ".join(f"{base} {about['size']}" for base, about in record.about.items())
    return "\n\n".join(
        [
            markdown.table(*Ways.table(record)),
            "Gain in accuracy on dictionaries with keys not used in tuning, the mean over the bases that were measured with "
            "so many heads; cost: the mean over bases, for the largest number of heads, ranking included. A pass is one "
            "sequence through all layers; seconds are of the processor.",
            f"![{Ways.title}](../../recipes/ways.png)",
            markdown.table(header, body),
            f"`+` and `-`: better or worse than `{DEFAULT}`, by the paired 95% interval over questions, which knows nothing of "
            "other seeds of tuning.",
            markdown.table([f"chooses as {DEFAULT} does", "heads", "layers"], alike),
            f"Pairs of a dictionary: {sizes}. {recipe['tune']['steps']} steps of tuning, {', '.join(map(str, sorted(seeds)))} "
            f"seed of tuning, {recipe['bench']['limit']} questions; random: {len(_draws(record))} draws. Measured "
            f"{origin.created[:10]} on {origin.machine}, version {origin.toolkit}, seed {origin.seed} "
            f"(`recipes/{RECORD.name}`).",
        ]
    )


def _draws(record: Findings) -> list[list[str]]:
    about = next(iter(record.about.values()))
    draws: list[list[str]] = next(iter(about["sites"]["random"].values()))
    return draws


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
