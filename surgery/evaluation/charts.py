"""The geometry of the page's figures: what the templates draw as SVG. Lengths are in the units of the figures' view box."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surgery.runtime import plotting as plots
from surgery.statistics import Estimate

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 42  # margins
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800")
# Drawn around 0, 0: a model is known by its shape, too.
MARKS = (
    "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0",
    "M-3.2,-3.2h6.4v6.4h-6.4z",
    "M0,-4.2L4.2,3.4H-4.2z",
    "M0,-4.6L4.6,0L0,4.6L-4.6,0z",
    "M0,4.2L4.2,-3.4H-4.2z",
    "M-1.4,-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
    "M-4.2,-2.1h8.4v4.2h-8.4z",
    "M-2.1,-4.2h4.2v8.4h-4.2z",
    "M-3.8,-3.8h7.6l-7.6,7.6h7.6z",
)
LOGARITHMIC = 20  # the largest by the smallest x, from which on small ones would lie on top of each other
ROOM = 26  # between two labels


@dataclass(frozen=True)
class Look:
    color: str
    mark: str
    dashed: bool = False


@dataclass(frozen=True)
class Point:
    """text: what is said when one points at it. low, high: of its interval, where it has one."""

    x: float
    y: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    look: Look
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Line:
    """A series as paths, and where its marks stand."""

    name: str
    look: Look
    line: str
    band: str
    marks: list[tuple[float, float]]


@dataclass(frozen=True)
class Column:
    """What belongs to one x: a strip to point at, and what it says of every series, the highest first."""

    left: float
    width: float
    at: float
    title: str
    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    columns: list[Column]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    header: list[str]
    table: list[list[str]]
    chance: str = ""
    note: str = ""
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


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Every model's colour and mark, as in the PNG figures; controls are dashed."""
    free = iter([color for color in COLORS if color not in {plots.COLORS.get(name) for name in names}] * len(names))
    return {
        name: Look(plots.COLORS.get(name) or next(free), MARKS[i % len(MARKS)], name.startswith("control"))
        for i, name in enumerate(names)
    }


def chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, unit: str, top: float | None = None,
    chance: bool = False, note: str = "",
) -> Chart:  # fmt: skip
    """Lines over a common x. unit: of x, in what is said of a point. top: of y; by default what all intervals need.
    chance: draw 1/x."""
    every = [point for one in series for point in one.points]
    xs = sorted({point.x for point in every})
    high = top or max(point.y if point.high is None else point.high for point in every) * 1.05 or 1.0
    logarithmic = xs[0] > 0 and xs[-1] > LOGARITHMIC * xs[0]
    bend = math.log2 if logarithmic else float
    span = bend(xs[-1]) - bend(xs[0]) or 1.0

    def across(x: float) -> float:
        return round(LEFT + 10 + (bend(x) - bend(xs[0])) / span * (WIDTH - LEFT - RIGHT - 20), 1)

    def up(y: float) -> float:
        return round(HEIGHT - BOTTOM - max(y, 0.0) / high * (HEIGHT - BOTTOM - TOP), 1)

    lines = []
    for one in series:
        ordered = sorted(one.points, key=lambda point: point.x)
        banded = [p for p in ordered if p.low is not None and p.high is not None]
        edge = [(p.x, p.high) for p in banded] + [(p.x, p.low) for p in reversed(banded)]
        lines.append(
            Line(
                one.name, one.look, _path([(across(p.x), up(p.y)) for p in ordered]),
                _path([(across(x), up(y or 0.0)) for x, y in edge]) + "z" if edge else "",
                [(across(p.x), up(p.y)) for p in ordered],
            )
        )  # fmt: skip
    said = {(one.name, point.x): point.text for one in series for point in one.points}
    steps = [xs[0] * (xs[-1] / xs[0]) ** (i / 60) for i in range(61)] if chance else []
    return Chart(
        title, f"{x_label} (log scale)" if logarithmic else x_label, y_label, lines, _columns(series, xs, across, unit),
        _x_ticks(xs, across), [(up(y), f"{y:g}") for y in _round(high)], [unit, *(one.name for one in series)],
        [[f"{x:,g}", *(said.get((one.name, x), "") for one in series)] for x in xs],
        _path([(across(x), up(1 / x)) for x in steps]), note,
    )  # fmt: skip


def bar(change: Estimate, bound: float, verdict: str) -> Bar:
    """A difference with its interval, as a mark on a line with zero in the middle."""
    low, value, high = (50 + 46 * max(-1.0, min(1.0, end / bound)) for end in (change.ci95[0], change.value, change.ci95[1]))
    return Bar(round(low, 1), round(value, 1), round(high, 1), verdict)


def minus(text: str) -> str:
    """Numbers as they are printed."""
    return text.replace("-", "\N{MINUS SIGN}")


def _columns(series: Sequence[Series], xs: list[float], across: Callable[[float], float], unit: str) -> list[Column]:
    places = [LEFT, *((across(a) + across(b)) / 2 for a, b in pairwise(xs)), WIDTH - RIGHT]
    columns = []
    for i, x in enumerate(xs):
        here = [(point, one) for one in series for point in one.points if point.x == x]
        rows = [(one.name, point.text) for point, one in sorted(here, key=lambda pair: -pair[0].y)]
        columns.append(Column(places[i], round(places[i + 1] - places[i], 1), across(x), f"{x:,g} {unit}", rows))
    return columns


def _x_ticks(xs: list[float], across: Callable[[float], float]) -> list[tuple[float, str]]:
    """The values of x, but for those whose label would cover the one before."""
    ticks: list[tuple[float, str]] = []
    for x in xs:
        label = f"{x:,g}"
        if not ticks or across(x) - ticks[-1][0] >= max(ROOM, 7 * len(label)):
            ticks.append((across(x), label))
    return ticks


def _round(high: float) -> list[float]:
    """Round numbers from 0 to `high`, about five."""
    rough = high / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [i * step for i in range(int(high / step * 1.0001) + 1)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points) if points else ""
