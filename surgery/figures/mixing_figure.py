"""Mixing matrices as figures: what the ends of an example's spans, and its last token, draw on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.figures import plotting
from surgery.figures.example import Window, example_matrices, example_tokens, short_question, window
from surgery.locating.ranked_heads import RankedHeads
from surgery.locating.subject import Subject

CELL = 0.19  # inches, the height of a row
TITLE, LABELS, CAPTION_HEIGHT = 0.32, 0.75, 0.8
PALETTE = "BuPu"  # from white: nothing; also in the page
CAPTION = """\
A row: how one token divides its weight over the earlier tokens (dark: much;
the colour is the root of the share). Framed: what the last token puts on the
answer. The matrix of an SSM includes the time step and not D."""


@dataclass(frozen=True)
class Strips:
    """Matrices over the same tokens. part: what of them is drawn. panels: of each its title, the share of the last row on the
    answer, and the matrix as shares (t, t)."""

    tokens: Sequence[str]
    part: Window
    panels: Sequence[tuple[str, float | None, np.ndarray]]


def draw_mixing(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ranking: RankedHeads, path: Path, top: int = 4
) -> None:
    """The mixing matrices of the leading heads (and of the first gather heads) over one example's tokens."""
    heads = ranking.columns
    leading = np.flatnonzero(heads.measured("pair_mass"))[:top].tolist()  # heads whose matrices can be had
    gather = [i for i in heads.with_role("gather").tolist() if i not in leading]
    chosen = [heads[i] for i in leading + gather[:2]]
    if not chosen:
        return
    probe = ranking.probe
    question = short_question(tokenizer, probe["name"], probe["options"], probe["seed"])
    ids, tokens, spans, answer = example_tokens(tokenizer, question)
    matrices = example_matrices(Subject.of(base, tokenizer), ids, [score.site for score in chosen])
    panels = []
    for score in chosen:
        matrix = shares(matrices[score.site])
        title = f"{score.site}, {score.role} head" if score.role else str(score.site)
        panels.append((title, float(matrix[-1, list(answer)].sum()) if answer else None, matrix))
    draw_strips([Strips(tokens, window(tokens, spans, answer), panels)], path)


def shares(matrix: Tensor) -> np.ndarray:
    """A mixing matrix (rows, t) as how each row divides its weight |M|. Rows differ in scale by orders of magnitude."""
    weight = matrix.abs().float().cpu().numpy()
    return weight / np.maximum(weight.sum(-1, keepdims=True), 1e-12)


def draw_strips(groups: Sequence[Strips], path: Path) -> None:
    """All matrices under each other; the tokens' labels stand once below every group."""
    panels = [(group, panel) for group in groups for panel in group.panels]
    height = sum(len(group.part.rows) * CELL + TITLE for group, _ in panels) + len(groups) * LABELS + CAPTION_HEIGHT
    ratios = [len(group.part.rows) for group, _ in panels]
    with plotting.drawing(path, len(panels), height=height, height_ratios=ratios) as (figure, axes):
        for axis, (group, panel) in zip(axes[:, 0], panels, strict=True):
            title, answer, matrix = panel
            paint(axis, matrix, group.tokens, group.part, labels=panel is group.panels[-1])
            axis.set_title(title)
            if answer is not None:
                axis.set_title(f"answer: {100 * answer:.0f}%", loc="right", fontsize=9, fontweight="normal")
        figure.supxlabel(CAPTION, fontsize=9.5, ha="left", x=0.01)


def paint(axis: Any, matrix: np.ndarray, tokens: Sequence[str], part: Window, *, labels: bool = True) -> None:
    """The part of one matrix of shares (t, t). labels: of the columns, too."""
    from matplotlib.patches import Rectangle

    axis.imshow(np.sqrt(matrix[np.ix_(part.rows, part.columns)]), cmap=PALETTE, vmin=0, vmax=1, aspect="auto")
    axis.set_yticks(range(len(part.rows)), part.labels, fontsize=9)
    axis.set_xticks(range(len(part.columns)))
    axis.tick_params(length=0)
    names = [printed(tokens[column]) for column in part.columns] if labels else []
    axis.set_xticklabels(names or [""] * len(part.columns), rotation=90, fontsize=9)
    for place in part.answer if labels else []:
        axis.get_xticklabels()[place].set_fontweight("bold")
    if part.answer:
        first, count = part.answer[0], len(part.answer)
        axis.add_patch(Rectangle((first - 0.5, len(part.rows) - 1.5), count, 1, fill=False, ec="#0072B2", lw=1.8))
    for place, (left, right) in enumerate(zip(part.columns, part.columns[1:], strict=False)):
        if right > left + 1:  # tokens were left out
            axis.axvline(place + 0.5, color="#57606A", lw=1.2, ls=":")


def printed(token: str) -> str:
    """A token as a label."""
    return token.replace("\\n", "↵") or "␣"
