"""The atlas of a base: a heat map of all heads for every score, with the marks that report.html has, and the leading heads.

Where a layer has more heads than can be told apart (a Mamba-1 has thousands of channels), neighbours share a cell, which shows
the one of them whose score is largest in size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.locating.mixing_figure import draw_mixing
from surgery.locating.questions import described
from surgery.locating.ranking import Ranking, ablation_cost, gain
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.runtime import plotting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLUMNS = 96  # of a map; more heads share cells
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
    """Where the heads of a ranking lie in a map. together: how many heads of a layer share a cell. rows, places: of every head
    in the ranking's order, its layer and its column."""

    layers: int
    heads: int
    together: int
    rows: np.ndarray
    places: np.ndarray

    @property
    def columns(self) -> int:
        return -(-self.heads // self.together)

    def values(self, ranking: Ranking, name: str) -> np.ndarray:
        """A score of all heads (layers, columns); of the heads of a cell, the largest in size. NaN: not measured, or a head
        that the layer lacks."""
        estimates = [getattr(score, name) for score in ranking.heads]
        measured = np.array([estimate is not None for estimate in estimates], dtype=bool)
        values = np.array([estimate.value for estimate in estimates if estimate is not None])
        order = np.argsort(np.abs(values), kind="stable")  # where several share a cell, the last one stays
        cells = np.full((self.layers, self.columns), np.nan)
        cells[self.rows[measured][order], self.places[measured][order]] = values[order]
        return cells


def grid(ranking: Ranking) -> Grid:
    """Every head in a cell of its own, up to MOST_COLUMNS heads a layer."""
    if not ranking.heads:
        raise UserError("there is nothing to draw: the ranking holds no heads")
    layers, heads = np.array([(score.site.layer, score.site.heads[0]) for score in ranking.heads]).T
    together = -(-(1 + int(heads.max())) // MOST_COLUMNS)
    return Grid(1 + int(layers.max()), 1 + int(heads.max()), together, layers, heads // together)


def measured_maps(ranking: Ranking) -> list[tuple[str, str, str]]:
    """Of MAPS those for which anything was measured."""
    return [about for about in MAPS if any(getattr(score, about[0]) is not None for score in ranking.heads)]


def draw_atlas(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ranking: Ranking, out: Path) -> None:
    """atlas.png (scores) and mixing.png (mixing matrices) in the folder `out`."""
    draw_scores(ranking, out / "atlas.png")
    draw_mixing(base, tokenizer, ranking, out / "mixing.png")


def draw_scores(ranking: Ranking, path: Path | None = None, plan: Plan | None = None) -> "Figure":
    """Heat maps layer x head, one for every score that was measured, and the leading heads as bars, written to `path` if there
    is one. A, G: aggregate and gather heads; framed: the heads of `plan`. White with a cross: not measured, or a head that the
    layer lacks."""
    maps, layout = measured_maps(ranking), grid(ranking)
    planned = {part for site in (plan.sites if plan else ()) for part in (site.each() or (site,))}
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
            f"{described(probe['name'], probe['options'])}, n = {probe['examples']}, base accuracy "
            f"{ranking.base_accuracy.accuracy:.2f}\n{_legend(layout, bool(planned))}", fontsize=9.5, ha="left", x=0.01,
        )  # fmt: skip
    return figure


def _legend(layout: Grid, planned: bool) -> str:
    shared = f"; a cell: the strongest of {layout.together} heads" if layout.together > 1 else ""
    return f"A: aggregate head, G: gather head{', framed: grafted' if planned else ''}{shared}"


def _draw_map(figure: Any, axis: Any, layout: Grid, values: np.ndarray, unit: str) -> None:
    bound = max(float(np.nanmax(np.abs(values))), 1e-9)
    diverging = unit.startswith("nats")
    axis.set_facecolor("white")
    axis.patch.set(hatch="xx", edgecolor="#DDDDDD", fill=True)
    image = axis.imshow(
        values, cmap="RdBu" if diverging else "viridis", vmin=-bound if diverging else 0, vmax=bound, aspect="auto",
        extent=(-0.5, layout.columns * layout.together - 0.5, layout.layers - 0.5, -0.5), interpolation="nearest",
    )  # fmt: skip
    axis.set(xlabel="head", ylabel="layer")
    axis.set_xticks(range(0, layout.heads, max(1, layout.heads // 8)))
    axis.set_yticks(range(0, layout.layers, max(1, layout.layers // 8)))
    bar = figure.colorbar(image, ax=axis, fraction=0.05, pad=0.02)
    bar.set_label(unit, fontsize=8.5)
    bar.ax.tick_params(labelsize=8.5)


def _mark(axis: Any, layout: Grid, ranking: Ranking, planned: set[Site]) -> None:
    """The letters of roles, of the costliest heads where there are many, and a frame around planned heads."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    large = layout.layers * layout.columns > LARGE
    with_role = sorted((score for score in ranking.heads if score.role), key=ablation_cost, reverse=True)
    halo = withStroke(linewidth=2, foreground="white")
    for score in with_role[:MOST_LETTERS]:
        axis.text(
            _middle(layout, score.site), score.site.layer, str(score.role)[0].upper(), ha="center", va="center", fontsize=8,
            color="#24292F", fontweight="bold", path_effects=[halo] if large else None,
            bbox=None if large else {"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.88},
        )  # fmt: skip
    line = 1.8 if layout.columns <= WIDE else 1.1
    for site in planned:
        width = layout.together if site.heads else layout.heads
        left = _middle(layout, site) - width / 2 if site.heads else -0.5
        axis.add_patch(Rectangle((left, site.layer - 0.5), width, 1, fill=False, ec="#24292F", lw=line, clip_on=False,
                                 path_effects=[withStroke(linewidth=line + 1, foreground="white")]))  # fmt: skip


def _middle(layout: Grid, site: Site) -> float:
    """Of a head's cell."""
    return (site.heads[0] // layout.together + 0.5) * layout.together - 0.5


def _draw_leading(axis: Any, ranking: Ranking, planned: set[Site]) -> None:
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
    axis.set_yticks(range(len(leading)), labels, fontsize=8.5)
    axis.axvline(0, color="#57606A", lw=0.8)
    axis.set_xlabel(ORDERED_BY[order], fontsize=8.5)
    axis.set_title("Leading heads, 95% intervals", fontsize=9.5)
