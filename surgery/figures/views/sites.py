"""sites.png: where attention was added, or windows are; for the card of an export."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from surgery.evaluation.report import Report
from surgery.families import family_of
from surgery.figures import plotting
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan

FILES = {"exported": ["sites.png"]}
COLUMNS = 128  # of the map; more heads than that (the channels of a Mamba-1) share columns


def exported(hybrid: PreTrainedModel, plan: Plan | None, _: Report | None, out: Path) -> None:
    """sites.png, where there is a plan."""
    if plan is not None:
        draw_sites(hybrid, plan, out / "sites.png")


def draw_sites(hybrid: PreTrainedModel, plan: Plan, path: Path) -> None:
    """The layer x head map of where attention was added, or windows are."""
    layers, heads = family_of(hybrid.config).shape(hybrid.config)
    sites = plan.sites
    if plan.windows is not None and not sites:
        sites, heads = plan.windows.sites, max(map(anatomy(hybrid).heads, range(layers)))
    columns = min(heads, COLUMNS)
    grafted = np.zeros((layers, columns))
    for site in sites:
        for head in site.heads or range(heads):
            grafted[site.layer, head * columns // heads] += 1
    sizes = np.bincount([head * columns // heads for head in range(heads)], minlength=columns)
    if plan.kind == "head":
        title = f"Attention at {sum(len(site.heads) for site in plan.sites):,} of {layers * heads:,} heads"
        if columns < heads:
            title += f"\n{-(-heads // columns)} heads a column, the darker the more"
    elif plan.kind == "window":
        title = f"Windows for {sum(len(site.heads) for site in sites):,} heads of the model's own attention"
    else:
        title = f"Attention instead of the mixer in {len(plan.sites)} of {layers} layers"
    with plotting.drawing(path, height=min(1.5 + 0.22 * layers, 7)) as (_, axes):
        axis = axes[0, 0]
        shades = np.where(grafted > 0, 0.45 + 0.55 * grafted / sizes, 0)  # a single channel of a column is still seen
        extent = (-0.5, heads - 0.5, layers - 0.5, -0.5)
        axis.imshow(shades, cmap="Blues", vmin=0, vmax=1.2, aspect="auto", extent=extent, interpolation="nearest")
        axis.set_xticks(_ticks(heads))
        axis.set_yticks(_ticks(layers))
        if columns == heads <= 64:  # a frame around every head
            axis.set_xticks(np.arange(heads + 1) - 0.5, minor=True)
            axis.set_yticks(np.arange(layers + 1) - 0.5, minor=True)
            axis.grid(which="minor", color="#cccccc", lw=0.5)
            axis.tick_params(which="minor", length=0)
        axis.set(xlabel="head", ylabel="layer", title=title)


def _ticks(count: int) -> range:
    return range(0, count, max(1, -(-count // 8)))
