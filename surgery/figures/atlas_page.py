"""The layer x head atlas of a ranking, as the page draws it: small maps of one score each, side by side, and for every head all
that was measured.

Of a model with more heads than can be pointed at one by one, a map is an image of all heads, as in atlas.png, and the leading
heads lie on it as cells.
"""

import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from surgery.figures.charts import minus
from surgery.figures.views.atlas import MOST_LETTERS, Grid, colors_of, grid, measured_maps, parts
from surgery.locating.heads import Score
from surgery.locating.ranked_heads import MANY, RankedHeads
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.statistics import Estimate

MOST = 512  # heads with cells of their own
LEADERS = 128  # where there are more
CELL = 20  # the side of a cell
GUTTER = 34  # for the layers' names
NARROW = 20  # columns, up to which a map is read without magnification
LABELS = 16  # names of layers, at most
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
SHARES = [name.endswith("_mass") for name in SCORES]
LEADING = 10  # in the table


@dataclass(frozen=True)
class MapCell:
    """head: its number in Atlas.heads."""

    head: int
    x: int
    y: int
    letter: str
    grafted: bool


@dataclass(frozen=True)
class Map:
    """One score. fills: a colour a cell; png: an image of all heads instead. ends: what the two ends of the scale stand for;
    steps: its colours."""

    title: str
    unit: str
    fills: list[str]
    png: str
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
    """heads: those that can be pointed at, in the ranking's order. labels: (y, layer). says: what Head.rows are. leading: the
    first heads, a row each. left_out: heads that cannot be pointed at. shared: heads of a layer stand best first, and share
    cells. listed: ranking.json lists all heads."""

    maps: list[Map] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    cells: list[MapCell] = field(default_factory=list)
    labels: list[tuple[int, str]] = field(default_factory=list)
    width: int = 0
    height: int = 0
    gutter: int = GUTTER
    says: tuple[str, ...] = SAYS
    leading: list[list[str]] = field(default_factory=list)
    wide: bool = False
    left_out: int = 0
    shared: bool = False
    listed: bool = True


def atlas(ranking: RankedHeads, plan: Plan | None) -> Atlas:
    """Layers from top to bottom, heads from left to right. plan: its heads (or layers) are outlined."""
    layout = grid(ranking)
    large = len(ranking.heads) > MOST
    grafted = {*parts(plan)}
    shown = _shown(ranking, grafted) if large else range(len(ranking.heads))
    scores = [ranking.heads[i] for i in shown]
    wide = layout.columns > NARROW
    gutter = 2 * GUTTER if wide else GUTTER
    cells = [
        MapCell(
            number, gutter + CELL * int(layout.places[i]), CELL * score.site.layer, (score.role or "")[:1].upper(),
            score.site in grafted or Site(score.site.layer) in grafted,
        )
        for number, (i, score) in enumerate(zip(shown, scores, strict=True))
    ]  # fmt: skip
    heads = [_head(score, grafted) for score in scores]
    leading = [
        [head.site, head.about, *(dict(head.rows).get(i, "") for i in range(len(SAYS)))] for head in heads[:LEADING]
    ]  # as a table, for those who cannot point
    step = max(-(-layout.layers // LABELS), 2 if wide else 1)  # the labels of wide maps are higher than a line
    return Atlas(
        [_map(ranking, scores, layout, large, *about) for about in measured_maps(ranking)], heads, cells,
        [(CELL * layer, f"L{layer}") for layer in range(0, layout.layers, step)],
        gutter + CELL * layout.columns + 2, CELL * layout.layers + 2, gutter=gutter, wide=wide, leading=leading,
        left_out=len(ranking.heads) - len(scores), shared=layout.edges is not None,
        listed=len(ranking.heads) <= MANY,
    )  # fmt: skip


def _shown(ranking: RankedHeads, grafted: set[Site]) -> list[int]:
    """Which heads of many have cells: the leading ones, the grafted ones, and those with a role whose ablation costs most."""
    heads = ranking.columns
    of_plan = [i for i in heads.find(sorted(grafted)) if i is not None]
    of_role = heads.with_role()[:MOST_LETTERS].tolist()
    return sorted({*range(min(LEADERS, len(heads))), *of_role, *sorted(of_plan)[:MOST]})


def _map(ranking: RankedHeads, scores: Sequence[Score], layout: Grid, large: bool, name: str, title: str, unit: str) -> Map:
    import matplotlib
    from matplotlib.colors import to_hex

    values = layout.values(ranking, name)
    name_of_palette, scale = colors_of(values, unit, layout)
    palette, low, high = matplotlib.colormaps[name_of_palette], scale.vmin, scale.vmax
    fills = []
    for score in () if large else scores:
        estimate = getattr(score, name)
        fills.append("none" if estimate is None else to_hex(palette(float(scale(estimate.value)))))
    # A pixel a cell, transparent where nothing was measured.
    png = as_png(Image.fromarray(palette(scale(np.ma.masked_invalid(values)), bytes=True), mode="RGBA")) if large else ""
    return Map(title, unit, fills, png, (minus(f"{low:.3g}"), f"{high:.3g}"), [to_hex(palette(i / 8)) for i in range(9)])


def as_png(image: Image.Image) -> str:
    """A PNG file as base64, as a page holds it."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return b64encode(file.getvalue()).decode()


def _printed(share: bool, estimate: Estimate) -> str:
    """A change with its sign, a share without."""
    return estimate.unsigned() if share else minus(str(estimate))


def _head(score: Score, grafted: set[Site]) -> Head:
    parts = [score.kind or "", f"{score.role} head" if score.role else "", "grafted" if score.site in grafted else ""]
    estimates = ((i, getattr(score, name)) for i, name in enumerate(SCORES))
    rows = [(i, f"{_printed(SHARES[i], estimate)} (n = {estimate.n})") for i, estimate in estimates if estimate is not None]
    if score.start is not None:
        rows.append((len(SCORES), minus(f"sign {score.start.sign:+d}, scale {score.start.tau:g}")))
    return Head(str(score.site), ", ".join(part for part in parts if part), rows)
