"""The atlas of a base: a heat map of all heads for every score, with the marks that report.html has, and the leading heads.

Where a layer has more heads than can be told apart (a Mamba-1 has thousands of channels, in no order that means anything), its
heads stand in the order of the ranking, best first: a row is then how scores fall off within its layer. The first few have a
cell each; behind them ever more heads share one, which shows the one of them whose score is largest in size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surgery.errors import UserError
from surgery.evaluation.views import MeasuredModels
from surgery.figures import plotting
from surgery.figures.ranking_of import ranking_of
from surgery.loading.opened import Checkpoint
from surgery.locating.heads import ROLES, gain
from surgery.locating.questions import probe_in_words
from surgery.locating.ranked_heads import RankedHeads
from surgery.records.plan import Plan
from surgery.records.site import Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = {"located": ["atlas.png"], "measured": ["atlas.png"]}
MOST_COLUMNS = 96  # of a map; more heads share cells
SHARED_COLUMNS = 56  # where they do
RANGE = 1000  # between the largest score of such a map and the size below which its colours no longer tell scores apart
WIDE = 16  # heads, from which a map takes the whole width
LARGE = 400  # heads, from which letters have no room in their cells
MOST_LETTERS = 24
LEADING = 10

MAPS = (
    ("ablation_loss", "Ablated: loss gained", "nats"),
    ("splice_loss", "Spliced: loss saved", "nats"),
    ("attribution", "Splice attribution (ranks heads)", "nats per unit of gate"),
    ("answer_mass", "Query picks out the answer's span", "share among spans"),
    ("pair_mass", "Span's end draws on its span", "share of weight"),
)
ORDERED_BY = {3: "loss saved when spliced, nats", 2: "splice attribution, nats per unit of gate",
              1: "loss gained when ablated, nats", 0: ""}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Where the heads of a ranking lie in a map. rows, places: of every head in the ranking's order, its layer and its column.
    edges: where heads share cells, the places within a layer (from 0, best first) with which the columns begin, and the number
    of heads; None where every head has a cell of its own, in the order of its number."""

    layers: int
    heads: int
    rows: np.ndarray
    places: np.ndarray
    edges: np.ndarray | None = None

    @property
    def columns(self) -> int:
        return self.heads if self.edges is None else len(self.edges) - 1

    def values(self, ranking: RankedHeads, name: str) -> np.ndarray:
        """A score of all heads (layers, columns); of the heads of a cell, the largest in size. NaN: not measured, or a head
        that the layer lacks."""
        heads = ranking.columns
        measured = heads.measured(name)
        values = heads.values(name)[measured]
        order = np.argsort(np.abs(values), kind="stable")  # where several share a cell, the last one stays
        cells = np.full((self.layers, self.columns), np.nan)
        cells[self.rows[measured][order], self.places[measured][order]] = values[order]
        return cells

    def ticks(self) -> tuple[list[float], list[str]]:
        """Of the columns: where labels are, and what they say."""
        if self.edges is None:
            numbers = list(range(0, self.heads, max(1, self.heads // 8)))
            return [float(number) for number in numbers], [str(number) for number in numbers]
        powers = [place for power in range(8) for place in (10**power, 3 * 10**power) if place <= self.heads]
        columns = (np.searchsorted(self.edges, np.array(powers) - 1, side="right") - 1).tolist()
        ticks: list[tuple[float, str]] = []
        for column, place in zip(columns, powers, strict=True):
            if not ticks or column - ticks[-1][0] >= self.columns / 12:  # else labels would run into each other
                ticks.append((float(column), f"{place:,}"))
        return [column for column, _ in ticks], [label for _, label in ticks]


def grid(ranking: RankedHeads) -> Grid:
    """Every head in a cell of its own, up to MOST_COLUMNS heads a layer."""
    if not ranking.heads:
        raise UserError("there is nothing to draw: the ranking holds no heads")
    layers, numbers = ranking.columns.layer, ranking.columns.head
    count, heads = 1 + int(layers.max()), 1 + int(numbers.max())
    if heads <= MOST_COLUMNS:
        return Grid(count, heads, layers, numbers)
    order = np.argsort(layers, kind="stable")
    first = np.searchsorted(layers[order], np.arange(count))
    places = np.empty(len(layers), dtype=int)
    places[order] = np.arange(len(layers)) - first[layers[order]]
    edges = np.unique(np.geomspace(1, heads + 1, SHARED_COLUMNS + 1).round().astype(int)) - 1
    return Grid(count, heads, layers, np.searchsorted(edges, places, side="right") - 1, edges)


def measured_maps(ranking: RankedHeads) -> list[tuple[str, str, str]]:
    """Of MAPS those for which anything was measured."""
    return [about for about in MAPS if ranking.columns.measured(about[0]).any()]


def located(_: Checkpoint, ranking: RankedHeads, out: Path) -> None:
    """atlas.png."""
    draw_scores(ranking, out / "atlas.png")


def measured(what: MeasuredModels, out: Path) -> None:
    """atlas.png once more, with the grafted heads framed."""
    if what.report.plan is not None and (ranking := ranking_of(what.report, out)) is not None:
        draw_scores(ranking, out / "atlas.png", what.report.plan)


def parts(plan: Plan | None) -> list[Site]:
    """The heads of a plan, or its layers, in its order."""
    return [part for site in (plan.sites if plan else ()) for part in (site.each() or (site,))]


def draw_scores(ranking: RankedHeads, path: Path | None = None, plan: Plan | None = None) -> "Figure":
    """Heat maps layer x head, one for every score that was measured, and the leading heads as bars, written to `path` if there
    is one. A, G: aggregate and gather heads; framed: the heads of `plan`. White with a cross: not measured, or a head that the
    layer lacks."""
    maps, layout = measured_maps(ranking), grid(ranking)
    planned = {*parts(plan)}
    columns = 1 if layout.columns > WIDE else 2
    rows = -(-(len(maps) + 1) // columns)
    height = min(4.2, 1.25 + 0.24 * layout.layers) if columns == 2 else min(4.2, 1.25 + 0.07 * max(layout.layers, 12))
    with plotting.drawing(path, rows, columns, width=6.4, height=0.6 + rows * max(height, 2.1)) as (figure, axes):
        for axis in axes.flat[len(maps) + 1 :]:
            axis.set_visible(False)
        for axis, (name, title, unit) in zip(axes.flat, maps, strict=False):
            _draw_map(figure, axis, layout, layout.values(ranking, name), unit)
            _mark(axis, layout, ranking, planned)
            axis.set_title(title, fontsize=9.5)
        _draw_leading(axes.flat[len(maps)], ranking, planned)
        probe = ranking.probe
        figure.suptitle(
            f"{probe_in_words(probe['name'], probe['options'])}, n = {probe['examples']}, base accuracy "
            f"{ranking.base_accuracy.accuracy:.2f}\n{_legend(layout, bool(planned))}", fontsize=9.5, ha="left", x=0.01,
        )  # fmt: skip
    return figure


def _legend(layout: Grid, planned: bool) -> str:
    shared = "" if layout.edges is None else ".\nA row: one layer's heads, best first; to the right ever more share a cell"
    return f"A: aggregate head, G: gather head{', framed: grafted' if planned else ''}{shared}"


def colors_of(values: np.ndarray, unit: str, layout: Grid) -> tuple[str, Any]:
    """The palette of a map, and the scale of its colours: logarithmic at both sides of 0 where a map has the whole range from
    the leading heads to those that do nothing."""
    from matplotlib.colors import Normalize, SymLogNorm

    high = max(float(np.nanmax(np.abs(values))), 1e-9)
    if not unit.startswith("nats"):
        return "viridis", Normalize(0, high)
    if layout.edges is None:
        return "RdBu", Normalize(-high, high)
    return "RdBu", SymLogNorm(high / RANGE, vmin=-high, vmax=high)


def _draw_map(figure: Any, axis: Any, layout: Grid, values: np.ndarray, unit: str) -> None:
    from matplotlib.colors import SymLogNorm

    palette, scale = colors_of(values, unit, layout)
    axis.set_facecolor("white")
    axis.patch.set(hatch="xx", edgecolor="#DDDDDD", fill=True)
    image = axis.imshow(
        values, cmap=palette, norm=scale, aspect="auto",
        extent=(-0.5, layout.columns - 0.5, layout.layers - 0.5, -0.5), interpolation="nearest",
    )  # fmt: skip
    axis.set(xlabel="head" if layout.edges is None else "place of the head within its layer, best first", ylabel="layer")
    axis.set_xticks(*layout.ticks())
    axis.set_yticks(range(0, layout.layers, max(1, layout.layers // 8)))
    bar = figure.colorbar(image, ax=axis, fraction=0.05, pad=0.02)
    bar.set_label(unit, fontsize=8.5)
    if isinstance(scale, SymLogNorm) and scale.vmax is not None:
        decades = 10.0 ** np.arange(np.floor(np.log10(scale.vmax)), np.log10(scale.linthresh), -1)
        bar.set_ticks([*-decades, 0, *decades[::-1]], labels=[f"{tick:g}" for tick in (*-decades, 0, *decades[::-1])])
        bar.minorticks_off()
    bar.ax.tick_params(labelsize=8.5)


def _mark(axis: Any, layout: Grid, ranking: RankedHeads, planned: set[Site]) -> None:
    """The letters of roles, of the costliest heads where there are many, and a frame around planned heads; one of each to a
    cell."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    heads, large = ranking.columns, layout.layers * layout.columns > LARGE
    halo = withStroke(linewidth=2, foreground="white")
    letters: dict[tuple[int, int], str] = {}
    for i in heads.with_role()[:MOST_LETTERS].tolist():
        letters.setdefault((int(layout.rows[i]), int(layout.places[i])), str(ROLES[heads.role[i]])[0].upper())
    for (row, column), letter in letters.items():
        axis.text(
            column, row, letter, ha="center", va="center", fontsize=8,
            color="#24292F", fontweight="bold", path_effects=[halo] if large else None,
            bbox=None if large else {"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.88},
        )  # fmt: skip
    line = 1.8 if layout.columns <= WIDE else 1.1
    whole = {(site.layer, None) for site in planned if not site.heads}
    single = [i for i in heads.find(sorted(planned)) if i is not None]
    for row, place in sorted(whole | {(int(layout.rows[i]), int(layout.places[i])) for i in single}, key=str):
        left, width = (-0.5, layout.columns) if place is None else (place - 0.5, 1)
        axis.add_patch(Rectangle((left, row - 0.5), width, 1, fill=False, ec="#24292F", lw=line, clip_on=False,
                                 path_effects=[withStroke(linewidth=line + 1, foreground="white")]))  # fmt: skip


def _draw_leading(axis: Any, ranking: RankedHeads, planned: set[Site]) -> None:
    """The first heads of the ranking by what ranks them."""
    order = gain(ranking.heads[0])[0]
    name = {3: "splice_loss", 2: "attribution", 1: "ablation_loss", 0: ""}[order]
    leading = [score for score in ranking.heads[:LEADING] if name and getattr(score, name) is not None][::-1]
    values = [getattr(score, name) for score in leading]
    errors = [[v.value - v.ci95[0] for v in values], [v.ci95[1] - v.value for v in values]]
    axis.barh(
        range(len(leading)), [v.value for v in values], xerr=errors, color="#56B4E9", error_kw={"lw": 1, "ecolor": "#57606A"},
        edgecolor=["#24292F" if score.site in planned else "none" for score in leading], linewidth=1.8,
    )  # fmt: skip
    labels = [f"{score.site} {score.role[0].upper() if score.role else ' '}" for score in leading]
    for i, score in enumerate(leading):
        also = ", ".join(ranking.also_for(score.site))
        axis.annotate(
            also, (1, i), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=7.5, color="#D55E00"
        )  # fmt: skip
    if ranking.skills and values:  # room for what is written there
        axis.set_xlim(right=1.9 * max(0.0, *(v.ci95[1] for v in values)) or None)
    axis.set_yticks(range(len(leading)), labels, fontsize=8.5)
    axis.axvline(0, color="#57606A", lw=0.8)
    axis.set_xlabel(ORDERED_BY[order], fontsize=8.5)
    axis.set_title("Leading heads" + (" (orange: also serve)" if ranking.skills else ", 95% intervals"), fontsize=9.5)
