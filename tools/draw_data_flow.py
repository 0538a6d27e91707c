"""The picture of docs/architecture.md: python -m tools.draw_data_flow [FOLDER, docs/images by default]."""

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parent.parent
INK, LINE, VERB, RECORD = "#1f2937", "#6b7280", "#dbeafe", "#fef3c7"


@dataclass(frozen=True)
class Box:
    """A verb (blue, named after its command; `package` does it) or a file that travels (yellow), around the point (x, y)."""

    x: float
    y: float
    name: str
    package: str = ""

    @property
    def width(self) -> float:
        return 2.5 if self.package else 2.0


VERBS = {
    "locate": Box(1.2, 2.1, "locate", "probes, locating"),
    "plan": Box(4.8, 2.1, "plan", "locating, choosing"),
    "splice": Box(8.4, 2.1, "splice", "families, splicing"),
    "tune": Box(12.0, 2.1, "tune", "tuning"),
    "bench": Box(7.6, -2.4, "bench", "evaluation, figures"),
    "export": Box(13.7, -0.9, "export", "exporting"),
}
RECORDS = {
    "base": Box(1.2, 4.1, "base\ncheckpoint"),
    "ranking": Box(3.0, 0.6, "ranking.json\natlas.png"),
    "plan": Box(6.6, 0.6, "plan.json"),
    "hybrid": Box(10.2, 0.6, "hybrid folder\n(untrained)"),
    "tuned": Box(13.7, 0.6, "hybrid folder\n(tuned)"),
    "report": Box(10.6, -2.4, "report.html\nreport.json"),
    "same base": Box(4.6, -2.4, "base\ncheckpoint"),
    "child": Box(13.7, -2.4, "hf, patch,\nnemotron_h, ..."),
}
ARROWS = [
    (RECORDS["base"], VERBS["locate"]),
    (VERBS["locate"], RECORDS["ranking"]),
    (RECORDS["ranking"], VERBS["plan"]),
    (RECORDS["base"], VERBS["plan"]),
    (VERBS["plan"], RECORDS["plan"]),
    (RECORDS["plan"], VERBS["splice"]),
    (RECORDS["base"], VERBS["splice"]),
    (VERBS["splice"], RECORDS["hybrid"]),
    (RECORDS["hybrid"], VERBS["tune"]),
    (VERBS["tune"], RECORDS["tuned"]),
    (RECORDS["same base"], VERBS["bench"]),
    (RECORDS["hybrid"], VERBS["bench"]),
    (RECORDS["tuned"], VERBS["bench"]),
    (VERBS["bench"], RECORDS["report"]),
    (RECORDS["tuned"], VERBS["export"]),
    (VERBS["export"], RECORDS["child"]),
]


def draw(folder: Path) -> Path:
    """Write data-flow.svg into a folder, the same bytes each time."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "data flow", "font.family": "sans-serif"}
    figure, axes = plt.subplots(figsize=(11, 5.6))
    shapes = {box: _draw_box(axes, box) for box in (*VERBS.values(), *RECORDS.values())}
    for start, end in ARROWS:
        style = {"arrowstyle": "-|>", "color": LINE, "lw": 1.4, "shrinkA": 2, "shrinkB": 2}
        ends = {"patchA": shapes[start], "patchB": shapes[end]}
        axes.annotate("", (end.x, end.y), (start.x, start.y), arrowprops=style | ends, zorder=1)
    legend = "blue: a command, and the\npackages that do it\n\nyellow: a file that travels"
    axes.text(0, -2.4, legend, ha="left", va="center", color=INK, fontsize=10)
    axes.set(xlim=(-0.2, 15.1), ylim=(-3.1, 4.8))
    return save(figure, folder / "data-flow.svg")


def save(figure: plt.Figure, path: Path) -> Path:
    """Write a drawing without axes, the same bytes every time."""
    figure.axes[0].axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return path


def _draw_box(axes: plt.Axes, box: Box) -> FancyBboxPatch:
    corner = (box.x - box.width / 2, box.y - 0.5)
    shape = FancyBboxPatch(
        corner, box.width, 1.0, boxstyle="round,pad=0.05,rounding_size=0.15",
        facecolor=VERB if box.package else RECORD, edgecolor=LINE, lw=1, zorder=2,
    )  # fmt: skip
    axes.add_patch(shape)
    if box.package:
        axes.text(box.x, box.y + 0.17, box.name, ha="center", va="center", color=INK, fontsize=12, weight="bold", zorder=3)
        axes.text(box.x, box.y - 0.22, box.package, ha="center", va="center", color=INK, fontsize=9, zorder=3)
    else:
        axes.text(box.x, box.y, box.name, ha="center", va="center", color=INK, fontsize=10, zorder=3)
    return shape


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"))
