"""The layer x head atlas of a ranking, as the page draws it: small maps of one score each, side by side, and for every head all
that was measured."""

from dataclasses import dataclass, field

import matplotlib
import numpy as np
from matplotlib.colors import to_hex

from surgery.evaluation.charts import minus
from surgery.locating.atlas import MAPS
from surgery.locating.ranking import Ranking, Score
from surgery.records.plan import Plan

MOST = 1024  # heads; of a model that has more, the leading ones
ACROSS, CELL = 64, 20  # heads in a line, and the side of a cell
GUTTER = 34  # for the layers' names
NARROW = 20  # heads, up to which a line is read without magnification
SCORES = {
    "ablation_drop": "ablated: accuracy lost",
    "ablation_loss": "ablated: loss gained, nats",
    "splice_gain": "spliced: accuracy gained",
    "splice_loss": "spliced: loss saved, nats",
    "attribution": "splice attribution (ranks heads), nats per unit of gate",
    "answer_mass": "query picks out the answer's span",
    "pair_mass": "span's end draws on its span",
}
SAYS = (*SCORES.values(), "its graft's start")
LEADING = 10


@dataclass(frozen=True)
class Cell:
    """head: its number in Atlas.heads."""

    head: int
    x: int
    y: int
    letter: str
    grafted: bool


@dataclass(frozen=True)
class Map:
    """One score. fills: a colour a head. ends: what the two ends of the scale stand for; steps: its colours."""

    title: str
    unit: str
    fills: list[str]
    ends: tuple[str, str]
    steps: list[str]


@dataclass(frozen=True)
class Head:
    """rows: what was measured: the number of its label in Atlas.says, and the text."""

    site: str
    about: str
    rows: list[tuple[int, str]]


@dataclass(frozen=True)
class Atlas:
    """heads: in the ranking's order. labels: (y, layer). says: what Head.rows are. leading: the first heads, a row each.
    left_out: heads that are not drawn."""

    maps: list[Map] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    labels: list[tuple[int, str]] = field(default_factory=list)
    width: int = 0
    height: int = 0
    cell: int = CELL
    gutter: int = GUTTER
    says: tuple[str, ...] = SAYS
    leading: list[list[str]] = field(default_factory=list)
    wide: bool = False
    left_out: int = 0


def atlas(ranking: Ranking, plan: Plan | None) -> Atlas:
    """Lay the heads out by layer; a layer of many heads takes several lines. plan: its heads (or layers) are outlined."""
    shown = ranking.heads[:MOST]
    grafted = {part for site in (plan.sites if plan else ()) for part in (site.each() or (site,))}
    layers: dict[int, list[int]] = {}
    for i in sorted(range(len(shown)), key=lambda i: shown[i].site):
        layers.setdefault(shown[i].site.layer, []).append(i)
    most = min(ACROSS, max(map(len, layers.values())))
    gutter = GUTTER if most <= NARROW else 2 * GUTTER
    cells, labels, line = [], [], 0
    for layer, members in layers.items():
        labels.append((line * CELL, f"L{layer}"))
        for k, i in enumerate(members):
            site = shown[i].site
            outlined = site in grafted or type(site)(layer) in grafted
            letter = (shown[i].role or " ")[0].upper().strip()
            cells.append(Cell(i, gutter + CELL * (k % ACROSS), CELL * (line + k // ACROSS), letter, outlined))
        line += -(-len(members) // ACROSS)
    measured = [about for about in MAPS if any(getattr(score, about[0]) is not None for score in shown)]
    maps = [_map(shown, *about) for about in measured]
    heads = [_head(score, grafted) for score in shown]
    leading = [
        [head.site, head.about, *(dict(head.rows).get(i, "") for i in range(len(SAYS)))] for head in heads[:LEADING]
    ]  # as a table, for those who cannot point
    return Atlas(
        maps, heads, cells, labels, gutter + CELL * most + 2, CELL * line + 2, gutter=gutter, wide=most > NARROW,
        leading=leading, left_out=len(ranking.heads) - len(shown),
    )  # fmt: skip


def _map(scores: tuple[Score, ...], name: str, title: str, unit: str) -> Map:
    found = [getattr(score, name) for score in scores]
    values = np.array([np.nan if one is None else one.value for one in found])
    diverging = unit.startswith("nats")
    high = max(float(np.nanmax(np.abs(values))), 1e-9)
    low = -high if diverging else 0.0
    palette = matplotlib.colormaps["RdBu" if diverging else "viridis"]
    fills = ["none" if np.isnan(v) else to_hex(palette((v - low) / (high - low))) for v in values]
    steps = [to_hex(palette(i / 8)) for i in range(9)]
    return Map(title, unit, fills, (minus(f"{low:.3g}"), f"{high:.3g}"), steps)


def _head(score: Score, grafted: set) -> Head:
    said = [score.kind or "", f"{score.role} head" if score.role else "", "grafted" if score.site in grafted else ""]
    rows = [(i, minus(f"{one} (n = {one.n})")) for i, name in enumerate(SCORES) if (one := getattr(score, name)) is not None]
    if score.start is not None:
        rows.append((len(SCORES), minus(f"sign {score.start.sign:+d}, scale {score.start.tau:g}")))
    return Head(str(score.site), ", ".join(part for part in said if part), rows)
