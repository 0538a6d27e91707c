"""How the project's figures look: one place for colours, sizes, axes and saving.

matplotlib is imported where a figure is drawn. Figures are made without pyplot, so that a notebook keeps its own backend.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from surgery.runtime.ownership.files import put

# Okabe and Ito's palette, safe for colour-blind readers; the base is black.
COLORS = {
    "base": "#24292F", "spliced": "#E69F00", "tuned": "#0072B2", "control_tuned": "#D55E00", "control_lora_tuned": "#E15759",
    "control_random_site": "#009E73", "control_random_site_tuned": "#CC79A7", "control_random_site_2": "#56B4E9",
    "control_same_layer": "#B8A800", "control_same_layer_tuned": "#8C564B", "control_random_windows": "#7B61FF",
    "control_random_windows_tuned": "#00798C",
}  # fmt: skip
CONTROLS = "#CDD3D9"  # the band of all controls
OTHERS = "#AEB6BF"  # lines of controls beside the best one
CHANCE = "#57606A"
WIDTH = 5.6  # inches; at the 700 pixels of a README's column, a point of the font is 1.7 pixels high, on a phone .9
STYLE: dict[Any, Any] = {
    "savefig.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "text.parse_math": False,  # a token may be a dollar
}
ACCURACY = "accuracy (higher is better)"


def lower(quantity: str) -> str:
    """The label of an axis of costs."""
    return f"{quantity} (lower is better)"


def shown(name: str) -> str:
    """A model's name in a figure."""
    return name.replace("_", " ")


def controls_label(count: int, others: bool = False) -> str:
    """What several controls are called. others: beside one that has its name."""
    return f"{count} {'other ' * others}control{'s' * (count != 1)}"


@contextmanager
def drawing(
    path: str | Path | None, rows: int = 1, columns: int = 1, *, height: float, width: float = WIDTH, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yields a figure of `width` x `height` inches and its axes (rows, columns), and writes it as PNG at the end, under its
    final name only when complete; where there is no path, not at all. options: of `Figure.subplots`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"Glyph \d+ .*missing from"
        )  # drawn as a box; names and tokens may be anything
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        yield figure, axes
        if path is None:
            return
        content = BytesIO()
        figure.savefig(content, format="png", metadata={"Software": None})
        put(path, content.getvalue())


def accuracy_axis(axis: Any, **labels: Any) -> None:
    """From 0 to 1, with a label that says which way is good."""
    axis.set(ylabel=ACCURACY, ylim=(0, 1.02), **labels)


def draw_line(
    axis: Any, x: Sequence[float], y: Sequence[float], intervals: Sequence[tuple[float, float]] | None = None, **style: Any
) -> None:
    """A line with marks, and a whisker for every interval (the only band of a figure is that of the controls). style: of
    `Axes.errorbar`."""
    errors = None
    if intervals is not None:
        errors = [[value - low for value, (low, _) in zip(y, intervals, strict=True)],
                  [high - value for value, (_, high) in zip(y, intervals, strict=True)]]  # fmt: skip
    axis.errorbar(x, y, yerr=errors, **{"marker": "o", "capsize": 2.5, "elinewidth": 1.2} | style)


def draw_controls(axis: Any, x: Sequence[float], values: Sequence[Sequence[float]], label: str = "") -> None:
    """values: of each control, over x. One grey band from the lowest to the highest, seen also where they are all the same.
    label: of the legend; by default how many controls there are."""
    low, high = (list(map(end, zip(*values, strict=True))) for end in (min, max))
    label = label or controls_label(len(values))
    if len(x) == 1:  # a band all the same
        x, low, high = [x[0] - 1, x[0] + 1], low * 2, high * 2
    axis.fill_between(x, low, high, color=CONTROLS, lw=3, joinstyle="round", zorder=1, label=label)


def draw_chance(axis: Any, x: Sequence[float], y: Sequence[float]) -> None:
    """What guessing gives."""
    if len(x) == 1:
        x, y = [x[0] - 1, x[0] + 1], [*y, *y]
    axis.plot(x, y, color=CHANCE, lw=1.2, ls=(0, (1, 2)), label="chance", zorder=1.5)


def legend(figure: Any, axis: Any, columns: int = 3) -> None:
    """Below the figure, whose whole width the axes then have; models first, then the controls and chance."""
    from matplotlib.container import BarContainer, ErrorbarContainer

    entries = list(zip(*axis.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: (not isinstance(entry[0], ErrorbarContainer | BarContainer), entry[1].startswith("chance")))
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.2)
