"""The picture of docs/ideas/why.md, how a gated graft works: python -m tools.draw_graft [FOLDER, docs/images by default]."""

import sys
from pathlib import Path
from typing import Any

from matplotlib.patches import Circle, FancyBboxPatch

from tools.draw_data_flow import INK, LINE, ROOT, plt, save

FROZEN, ADDED, ADDED_INK = "#eef0f3", "#cfe8fb", "#0b5fa5"
BOXES = {  # name: (x, y, width, height, whether it is added, what it says)
    "in": (1.1, 3.0, 1.7, 1.3, False, "input\nprojection"),
    "scan": (5.6, 4.6, 3.9, 1.5, False, "SSM: the past in a state\nof fixed size"),
    "attention": (5.6, 1.35, 3.9, 1.7, True, "attention: a softmax over\nall earlier tokens,\nfrom a cache that grows"),
    "out": (13.3, 3.0, 2.3, 1.3, False, "norm, output\nprojection"),
}


def draw(folder: Path) -> Path:
    """Write gated-graft.svg into a folder, the same bytes each time."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gated graft", "font.family": "sans-serif"}
    figure, axes = plt.subplots(figsize=(11, 5))
    for x, y, width, height, added, text in BOXES.values():
        corner, style = (x - width / 2, y - height / 2), "round,pad=0.05,rounding_size=0.15"
        color = ADDED if added else FROZEN
        axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color, edgecolor=LINE, lw=1, zorder=2))
        axes.text(x, y, text, ha="center", va="center", color=ADDED_INK if added else INK, fontsize=10.5, zorder=3)
    for x, y, text, added in ((9.0, 4.6, "times 1 - g", False), (9.0, 1.35, "times g", True), (10.9, 3.0, "+", False)):
        size = 0.34 if text == "+" else 0.7
        axes.add_patch(Circle((x, y), size, facecolor=ADDED if added else "white", edgecolor=LINE, lw=1, zorder=2))
        axes.text(x, y, text, ha="center", va="center", color=ADDED_INK if added else INK, fontsize=8.5, zorder=3)
    for start, end in (
        ((-0.6, 3.0), (0.2, 3.0)), ((2.0, 3.3), (3.6, 4.6)), ((2.0, 2.7), (3.6, 1.35)), ((7.6, 4.6), (8.36, 4.6)),
        ((7.6, 1.35), (8.36, 1.35)), ((9.45, 4.15), (10.62, 3.25)), ((9.45, 1.8), (10.62, 2.75)), ((11.26, 3.0), (12.1, 3.0)),
        ((14.5, 3.0), (15.1, 3.0)),
    ):  # fmt: skip
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": LINE, "lw": 1.4}, zorder=1)
    small: dict[str, Any] = {"fontsize": 10, "color": INK, "va": "center", "linespacing": 1.4}
    axes.text(2.05, 4.5, "C, B, x, dt", ha="center", **small)
    axes.text(1.75, 1.15, "copies of C and B,\nand x, dt", ha="center", **small | {"color": ADDED_INK})
    axes.text(9.0, 0.42, "learned", ha="center", **small | {"color": ADDED_INK})
    title = "A grafted head adds attention to its SSM; a learned gate divides between them"
    axes.text(-0.6, 6.1, title, fontsize=13, weight="bold", color=INK, va="center")
    axes.text(-0.6, -0.75, "Grey: the base's own, never written. Blue: added, and the only part that is trained.", **small)
    axes.set(xlim=(-0.7, 15.2), ylim=(-1.1, 6.5), aspect="equal")
    return save(figure, folder / "gated-graft.svg")


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"))
