"""The atlas of a base: heat maps of all heads, and the mixing matrices of the leading ones over an example's tokens."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.locating.matrices import mixing_matrices
from surgery.locating.questions import choice_probe, described
from surgery.locating.ranking import Ranking, Score
from surgery.locating.subject import Subject
from surgery.models.tokens import opening
from surgery.probes.question import Question
from surgery.records.site import Site
from surgery.runtime import plotting as plots

SHORT = 6  # lines of a dictionary, in a figure
MOST_LABELS = 150  # tokens; more labels than that cover each other

MAPS = (
    ("ablation_loss", "Ablated: loss gained", "nats"),
    ("splice_loss", "Spliced: loss saved", "nats"),
    ("attribution", "Splice attribution (ranks heads)", "nats per unit of gate"),
    ("answer_mass", "Query picks out the answer's span", "share among spans"),
    ("pair_mass", "Span's end draws on its span", "share of weight"),
)


def draw_atlas(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ranking: Ranking, out: Path) -> None:
    """atlas.png (scores) and mixing.png (mixing matrices) in the folder `out`."""
    draw_scores(ranking, out / "atlas.png")
    draw_mixing(base, tokenizer, ranking, out / "mixing.png")


def draw_scores(ranking: Ranking, path: Path) -> None:
    """Heat maps layer x head, one per score that was measured; the leading heads carry their role's initial. White: a head that
    was not measured, or that a layer lacks."""
    maps = [m for m in MAPS if any(getattr(score, m[0]) is not None for score in ranking.heads)]
    layers = 1 + max(score.site.layer for score in ranking.heads)
    heads = 1 + max(score.site.heads[0] for score in ranking.heads)
    with plt.rc_context(plots.STYLE):
        width = min(1.2 + 0.28 * heads, 12)
        height = min(1.1 + 0.28 * layers, 10)
        columns = 1 if heads > 48 else min(len(maps), 3)  # wide maps stand above each other
        rows = -(-len(maps) // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(columns * (width + 0.6), rows * (height + 0.4)), squeeze=False)
        for axis in axes.flat[len(maps) :]:
            axis.set_visible(False)
        for axis, (field, title, unit) in zip(axes.flat, maps, strict=False):
            grid = np.full((layers, heads), np.nan)
            for score in ranking.heads:
                if (estimate := getattr(score, field)) is not None:
                    grid[score.site.layer, score.site.heads[0]] = estimate.value
            if unit.startswith("nats"):
                bound = max(np.nanmax(np.abs(grid)), 1e-9)
                image = axis.imshow(grid, cmap="RdBu", norm=TwoSlopeNorm(0, -bound, bound), aspect="auto")
            else:
                image = axis.imshow(grid, cmap="viridis", vmin=0, aspect="auto")
            if layers * heads <= 400:
                for score in ranking.heads:
                    if score.role:
                        axis.text(score.site.heads[0], score.site.layer, score.role[0].upper(), ha="center", va="center",
                                  fontsize=8, fontweight="bold", color="black",
                                  bbox={"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8})  # fmt: skip
            axis.set_title(title)
            axis.set_xlabel("head")
            axis.set_ylabel("layer")
            axis.set_xticks(range(0, heads, max(1, heads // 8)))
            axis.set_yticks(range(0, layers, max(1, layers // 8)))
            figure.colorbar(image, ax=axis, label=unit, fraction=0.05, pad=0.03)
        probe = ranking.probe
        figure.suptitle(
            f"{described(probe['name'], probe['options'])}, n = {probe['examples']}, base accuracy "
            f"{ranking.base_accuracy.accuracy:.2f}.  A: aggregate head, G: gather head", fontsize=10,
        )  # fmt: skip
        figure.tight_layout()
        plots.save(figure, path)


def draw_mixing(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ranking: Ranking, path: Path, top: int = 4) -> None:
    """The mixing matrices of the leading heads (and of the first gather heads) over one example's tokens."""
    leading = [score for score in ranking.heads if score.pair_mass is not None][:top]  # heads whose matrices can be had
    gather = [score for score in _by_ablation(ranking) if score.role == "gather" and score not in leading]
    chosen = leading + gather[:2]
    if not chosen:
        return
    probe = ranking.probe
    asked = short_question(tokenizer, probe["name"], probe["options"], probe["seed"])
    labels, matrices = example(base, tokenizer, [score.site for score in chosen], asked)
    with plt.rc_context(plots.STYLE):
        columns = min(3, len(chosen))
        rows = -(-len(chosen) // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 5.0 * rows), squeeze=False)
        for axis in axes.flat[len(chosen) :]:
            axis.set_visible(False)
        for axis, score in zip(axes.flat, chosen, strict=False):
            paint(axis, matrices[score.site], labels, f"{score.site}" + (f" ({score.role})" if score.role else ""))
        figure.suptitle(
            "Mixing matrices |M| (of an SSM: time step included, D not): share of each row's weight (square root)", fontsize=10
        )
        figure.tight_layout()
        plots.save(figure, path)


def example(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sites: Collection[Site], question: Question
) -> tuple[list[str], dict[Site, Tensor]]:
    """The tokens of a question, and over them the mixing matrices (t, t) of heads."""
    subject = Subject.of(base, tokenizer)
    (ids,) = opening(tokenizer, [question.prompt])
    labels = [str(tokenizer.decode([token])).replace("\n", "\\n").strip(" ") for token in ids]
    return labels, mixing_matrices(subject, torch.tensor(ids, device=base.device), sites=sites)


def paint(axis: Axes, matrix: Tensor, labels: list[str], title: str) -> None:
    """One mixing matrix over its tokens. Rows differ in scale by orders of magnitude; what matters is how a row divides its
    weight, so that is what is shown (its square root)."""
    weight = matrix.abs().float().cpu().numpy()
    axis.imshow(np.sqrt(weight / np.maximum(weight.sum(-1, keepdims=True), 1e-12)), cmap="magma", vmin=0, vmax=1)
    axis.set_title(title)
    if len(labels) <= MOST_LABELS:
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5)
        axis.set_yticks(range(len(labels)), labels, fontsize=5)


def short_question(tokenizer: PreTrainedTokenizerBase, probe: str, options: dict[str, Any], seed: int) -> Question:
    """A question of a probe whose tokens can be read in a figure: of fewer lines, where the probe has such an option and its
    others allow it."""
    shorter = {option: min(SHORT, value) for option, value in options.items() if option in ("pairs", "entries")}
    try:
        chosen = choice_probe(tokenizer, probe, options | shorter)
    except UserError:  # more queries than so few pairs, say
        chosen = choice_probe(tokenizer, probe, options)
    return chosen.questions(1, seed=seed)[0]


def _by_ablation(ranking: Ranking) -> list[Score]:
    return sorted(ranking.heads, key=lambda s: -(s.ablation_loss.value if s.ablation_loss else 0.0))
