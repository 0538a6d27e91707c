"""recipes/mixers.png: what each kind of mixer gains and what its text pays, a point a seed, from the findings of the study of
seeds: python -m tools.redraw"""

from pathlib import Path
from statistics import fmean

from surgery.evaluation.results import value
from surgery.figures import plotting
from surgery.studies import Findings
from surgery.studies.seeds import BASE, SEED, TEXT
from tools.mixers_page import files

TEXT_BOUND = 0.01  # nats: a rise of the loss beyond it is a price, as plan.auto.text_bound has it
CLOSE = 0.1  # of accuracy: the lower one of two kinds so close has its name below its points
TICKS = (0, 0.01, 0.1, 1)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def points(findings: Findings) -> list[tuple[float, float]]:
    """A seed: (by how much the loss on text rises, nats per token; by how much retrieval at the largest size does), tuned in
    the first way."""
    size = max((figure for figure in findings.rows[0].figures if figure.startswith("kv.")), key=lambda name: int(name[3:]))
    first = next(iter((findings.provenance.recipe or {})["study"].get("ways", {"tuned": {}})))
    rows = {row.what: row.figures for row in findings.rows}
    seeds = [what.rpartition(SEED)[2] for what in rows if what.startswith(f"{first}{SEED}")]
    tuned, base = ([rows[f"{model}{SEED}{seed}"] for seed in seeds] for model in (first, BASE))
    return [(value(own[TEXT]), value(own[size]) - value(other[size])) for own, other in zip(tuned, base, strict=True)]


def _overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    """Whether two kinds have points above each other."""
    (low, high), (least, most) = ((min(x for x, _ in each), max(x for x, _ in each)) for each in (one, other))
    return low <= most and least <= high


def draw(path: Path) -> None:
    """Lines are labelled directly; the title says the result."""
    of = {kind: points(Findings.read(file)) for file, kind in files().items()}
    paid = {kind: fmean(x for x, _ in each) for kind, each in of.items()}
    dear = sorted((kind for kind in paid if paid[kind] > TEXT_BOUND), key=lambda kind: -paid[kind])
    least = min(y for each in of.values() for _, y in each)
    with plotting.drawing(path, height=3.4, width=7.0) as (_, axes):
        axis = axes[0, 0]
        for (kind, each), color in zip(of.items(), COLORS, strict=False):
            axis.plot(*zip(*each, strict=True), "o", ms=6, alpha=0.8, color=color)
            ys = [y for _, y in each]
            crowded = any(0 < fmean(y for _, y in other) - fmean(ys) < CLOSE and _overlap(each, other) for other in of.values())
            place, offset = (min(ys), -14) if crowded else (max(ys), 5)
            where = max(x for x, _ in each), place
            axis.annotate(kind, where, (4, offset), textcoords="offset points", color=color, fontsize=9.5, ha="center")
        axis.axvline(0, color=plotting.CHANCE, lw=0.8)
        axis.set(
            xlabel="rise of the loss on text, nats per token (lower is better)", ylabel="rise of accuracy\nof retrieval",
            ylim=(0, 1),
        )  # fmt: skip
        axis.set_xscale("symlog", linthresh=0.01)
        axis.set_xlim(-0.004, 4)
        axis.set_xticks(TICKS, map(str, TICKS))
        axis.set_title(
            f"Retrieval rises by {least:.2f} or more with every mixer;\ntext pays for it with {' and '.join(dear) or 'none'}"
        )
