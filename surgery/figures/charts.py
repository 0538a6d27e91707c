"""The geometry of the page's figures: what the templates draw as SVG. Lengths are in the units of the figures' view box."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surgery.figures.lines import Figure, Look, Series
from surgery.statistics import Estimate

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 42  # margins
DIGIT = 7  # the width of one in a label


@dataclass(frozen=True)
class Line:
    """A series as paths, its intervals included, and where its marks are."""

    name: str
    look: Look
    line: str
    whiskers: str
    marks: list[tuple[float, float]]


@dataclass(frozen=True)
class Column:
    """What belongs to one x: a strip to point at, and the text of every series, the highest first."""

    left: float
    width: float
    at: float
    title: str
    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class Chart:
    """A figure in the units of its view box. chance: a path, or nothing."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    columns: list[Column]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    header: list[str]
    table: list[list[str]]
    chance: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True)
class Bar:
    """A difference on a line from -bound to bound, from 0 to 100."""

    low: float
    value: float
    high: float
    verdict: str


def chart(figure: Figure) -> Chart:
    """Where everything of a figure lies."""

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + 10 + figure.share(x) * (WIDTH - LEFT - RIGHT - 20)
        return round(across, 1), round(HEIGHT - BOTTOM - figure.rise(y) * (HEIGHT - BOTTOM - TOP), 1)

    xs, texts = figure.xs, {(line.name, point.x): point.text for line in figure.series for point in line.points}
    chance = [place(x, y) for x, y in figure.chance]
    return Chart(
        figure.result, figure.x_label + " (log scale)" * figure.logarithmic, figure.quantity,
        [_line(line, place) for line in figure.series], _columns(figure, [place(x, 0)[0] for x in xs]),
        [(place(x, 0)[0], label) for x, label in figure.ticks((WIDTH - LEFT - RIGHT - 20) / DIGIT)],
        [(place(xs[0], y)[1], f"{y:g}") for y in _round(*figure.span)], [figure.unit, *(line.name for line in figure.series)],
        [[f"{x:,g}", *(texts.get((line.name, x), "") for line in figure.series)] for x in xs],
        f"M{LEFT},{chance[0][1]:g}H{WIDTH - RIGHT}" if len(chance) == 1 else _path(chance),
    )  # fmt: skip


def bar(change: Estimate, bound: float, verdict: str) -> Bar:
    """A difference with its interval, as a mark on a line with zero in the middle."""
    low, value, high = (50 + 46 * max(-1.0, min(1.0, end / bound)) for end in (change.ci95[0], change.value, change.ci95[1]))
    return Bar(round(low, 1), round(value, 1), round(high, 1), verdict)


def minus(text: str) -> str:
    """Numbers as they are printed."""
    return text.replace("-", "\N{MINUS SIGN}")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points) if points else ""


def _line(series: Series, place: Callable[[float, float], tuple[float, float]]) -> Line:
    marks, whiskers = [place(point.x, point.y) for point in series.points], ""
    for point in series.points:
        if point.low is not None and point.high is not None:
            (x, low), (_, high) = place(point.x, point.low), place(point.x, point.high)
            whiskers += f"M{x:g},{low:g}V{high:g}M{x - 3:g},{low:g}h6M{x - 3:g},{high:g}h6"
    return Line(series.name, series.look, _path(marks), whiskers, marks)


def _columns(figure: Figure, places: list[float]) -> list[Column]:
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - RIGHT]
    columns = []
    for i, x in enumerate(figure.xs):
        rows = [(point.y, line.name, point.text) for line in figure.series for point in line.points if point.x == x]
        texts = [(name, text) for _, name, text in sorted(rows, key=lambda row: -row[0])]
        columns.append(Column(edges[i], round(edges[i + 1] - edges[i], 1), places[i], f"{x:,g} {figure.unit}", texts))
    return columns


def _round(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, about five."""
    rough = (high - low) / 5 or 1.0
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step * 1.0001) + 1)]
