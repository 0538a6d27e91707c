"""The figures of a report: retrieval against the size of the dictionary, gain against divergence from the base, and the
circuit.

Each is drawn once by matplotlib, without pyplot, and goes as PNG into a file and as SVG into the page, where the ink of the
page replaces that of the figure.
"""

import math
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from surgery.locating.circuit import draw_circuit
from surgery.records.ranking import Ranking
from surgery.records.report import ModelReport, Report
from surgery.runtime.progress import printable

# Okabe and Ito's palette, safe for colour-blind readers.
INK, QUIET, FAINT = "#24292f", "#6a7178", "#c3c9cf"
MAIN, UNTRAINED, CONTROL = "#0072b2", "#56b4e9", "#d55e00"
LEAST_KL = 1e-7  # stands for less, on an axis of logarithms
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "text.color": INK,
    "axes.labelcolor": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
PLAIN: Any = {"parse_math": False}  # of texts with names that are not ours
TITLE: Any = PLAIN | {"loc": "left", "weight": "bold", "fontsize": 10.5, "color": INK}


def draw_retrieval(report: Report) -> Any | None:
    """Accuracy against the number of pairs in a dictionary; None where fewer than two sizes were asked. The base, the main
    model, it untrained, and the strongest control have colours; the other controls are faint. All are named at their lines'
    ends."""
    sizes = sorted(int(name.partition(".")[2]) for name in report.measurements if name.startswith("kv."))
    if len(sizes) < 2:
        return None
    largest = f"kv.{sizes[-1]}"
    best = report.best_control(largest)
    figure, axis = _new_figure(3.7)
    ends: list[tuple[float, float, str, str]] = []
    for name, model in report.models.items():
        points = [(size, model.results[f"kv.{size}"]) for size in sizes if f"kv.{size}" in model.results]
        if not points:
            continue
        color, style = _look(report, name, best)
        x, y = [size for size, _ in points], [each.mean for _, each in points]
        errors = [[each.mean - each.low for _, each in points], [each.high - each.mean for _, each in points]]
        faint = color == FAINT
        axis.errorbar(
            x,
            y,
            yerr=None if faint else errors,
            color=color,
            ls=style,
            marker=None if faint and len(points) > 1 else "o",
            ms=4,
            capsize=2.5,
            elinewidth=1.1,
            lw=1.2 if faint else 2,
            zorder=1 if faint else 3,
        )
        if points[-1][0] == sizes[-1]:
            ends.append((x[-1], y[-1], f"{model.description} {y[-1]:.3f}", QUIET if faint else color))
    guess = [report.measurements[f"kv.{size}"].chance or 0.0 for size in sizes]
    axis.plot(sizes, guess, color=QUIET, lw=1, ls=(0, (1, 2)), zorder=1)
    ends.append((sizes[-1], guess[-1], "chance", QUIET))
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set(ylim=(0, 1.03), xlabel="pairs in the dictionary", ylabel="questions answered correctly")
    base, main = report.base.results.get(largest), report.main.results.get(largest)
    if base and main:
        axis.set_title(f"With {sizes[-1]} pairs: {base.mean:.3f} before, {main.mean:.3f} after", **TITLE)
    _label(axis, ends)
    return figure


def draw_gain(report: Report) -> Any | None:
    """Gain in the main measurement against the KL divergence from the base on held-out text; None where no model has both."""
    name = report.verdict.measurement
    measurement = report.measurements[name]
    sign = -1 if measurement.metric == "loss" else 1
    models = {key: (m, m.on_text.kl.mean) for key, m in report.models.items() if m.on_text is not None and name in m.changes}
    if not models:
        return None
    figure, axis = _new_figure(3.4)
    best, labels = report.best_control(), []
    for key, (model, divergence) in models.items():
        color, _ = _look(report, key, best)
        color = QUIET if color == FAINT else color
        change, kl = model.changes[name], max(divergence, LEAST_KL)
        y, ends = sign * change.mean, sorted((sign * change.low, sign * change.high))
        axis.errorbar(
            [kl], [y], yerr=[[y - ends[0]], [ends[1] - y]], color=color, marker="o", ms=6, capsize=2.5, elinewidth=1.1
        )
        labels.append((kl, y, model.description, color))
    axis.axhline(0, color=FAINT, lw=1, zorder=0)
    axis.set_xscale("log")
    axis.margins(y=0.15)
    decades = [math.log10(kl) for kl, _, _, _ in labels]
    axis.set_xlim(10 ** math.floor(min(decades) - 0.1), 10 ** math.ceil(max(decades) + 0.1))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("KL divergence from the base on held-out text, nats per token (less is better)", loc="left")
    axis.set_ylabel("nats saved per token" if sign < 0 else "more right answers")
    axis.set_title(f"Gain ({measurement.label}) against the change of ordinary text", **TITLE)
    _label(axis, labels)
    return figure


def draw_figures(report: Report, ranking: Ranking | None = None) -> dict[str, Any]:
    """The figures of a report by name; None where there is nothing to draw."""
    return {"retrieval": draw_retrieval(report), "gain": draw_gain(report), "circuit": draw_circuit(ranking)}


def save_figures(drawn: dict[str, Any], folder: Path) -> list[str]:
    """Write those that there are as NAME.png, on white and without a date, and return these names."""
    files = {f"{name}.png": figure for name, figure in drawn.items() if figure is not None}
    for name, figure in files.items():
        figure.savefig(folder / name, dpi=150, facecolor="white", metadata={"Software": None})
    return list(files)


def as_svg(figure: Any, name: str) -> str:
    """To stand in a page: its text is text, its ink the page's. name: unique in the page."""
    import matplotlib

    content = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = printable(content.getvalue())
    svg = svg[svg.index("<svg") :]
    for ink, of_page in ((INK, "currentColor"), (QUIET, "var(--quiet)"), (FAINT, "var(--line)"), (MAIN, "var(--accent)")):
        svg = svg.replace(ink, of_page)
    svg = re.sub(r"font-family: [^;\"]*;", "", re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL))
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{name}"', svg, count=1)
    return re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", svg)


def _new_figure(height: float) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        return figure, figure.add_subplot()


def _look(report: Report, name: str, best: str | None) -> tuple[str, Any]:
    """(colour, line) of a model."""
    model: ModelReport = report.models[name]
    if model.role == "base":
        return INK, "-"
    if name == report.verdict.model:
        return MAIN, "-"
    if model.role == "hybrid":
        return UNTRAINED, "--"
    return (CONTROL, "-") if name == best else (FAINT, "-")


def _label(axis: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write a text for each point (x, y, text, colour) to the right of the axis, moved apart so that no two touch."""
    bottom, top = axis.get_ylim()
    least = 0.062 * (top - bottom)
    ordered = sorted(points, key=lambda point: point[1])
    heights = [y for _, y, _, _ in ordered]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + least)
    highest = top
    for i in reversed(range(len(heights))):
        heights[i] = highest = min(heights[i], highest)
        highest -= least
    for (x, y, text, color), height in zip(ordered, heights, strict=True):
        line = {"arrowstyle": "-", "color": color, "lw": 0.5, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
        axis.annotate(
            text,
            (x, y),
            (1.03, height),
            textcoords=("axes fraction", "data"),
            color=color,
            fontsize=9,
            va="center",
            arrowprops=line,
            annotation_clip=False,
            **PLAIN,
        )
