"""The geometry of the page's figures: what the templates draw as SVG. Lengths are in the units of the figures' view box."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surgery.records.names import is_control
from surgery.runtime import plotting
from surgery.statistics import Estimate

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 42  # margins
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800")
# A model is known by its shape, too: as a path around 0, 0, and as matplotlib calls it.
MARKS = (
    ("M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0", "o"),
    ("M-3.2,-3.2h6.4v6.4h-6.4z", "s"),
    ("M0,-4.2L4.2,3.4H-4.2z", "^"),
    ("M0,-4.6L4.6,0L0,4.6L-4.6,0z", "D"),
    ("M0,4.2L4.2,-3.4H-4.2z", "v"),
    ("M-1.4,-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z", "P"),
    ("M-4.2,-2.1h8.4v4.2h-8.4z", "_"),
    ("M-2.1,-4.2h4.2v8.4h-4.2z", "|"),
    ("M-3.8,-3.8h7.6l-7.6,7.6h7.6z", "X"),
)
LOGARITHMIC = 20  # the largest by the smallest x, from which on small ones would lie on top of each other
ROOM = 26  # between two labels


@dataclass(frozen=True)
class Look:
    """mark: an SVG path; marker: the same in matplotlib."""

    color: str
    mark: str
    marker: str
    control: bool = False

    @property
    def paint(self) -> str:
        """The colour in the page, where the base's is the text's, by day and by night."""
        return "currentColor" if self.color == plotting.COLORS["base"] else self.color


@dataclass(frozen=True)
class Point:
    """text: what is shown when a reader points at it. low, high: of its interval, where it has one."""

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
    """A series as paths, its intervals included, and where its marks stand."""

    name: str
    look: Look
    line: str
    whiskers: str
    marks: list[tuple[float, float]]


@dataclass(frozen=True)
class Band:
    """All controls as one area, from the lowest to the highest."""

    name: str
    path: str


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
    """chance: paths of what guessing gives."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    controls: Band | None
    columns: list[Column]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    header: list[str]
    table: list[list[str]]
    chance: list[str]
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


class _Scale:
    """From values to places in the view box. xs: in order; high: the top of y, whose foot is 0."""

    def __init__(self, xs: list[float], high: float):
        self.logarithmic = xs[0] > 0 and xs[-1] > LOGARITHMIC * xs[0]
        self.bend: Callable[[float], float] = math.log2 if self.logarithmic else float
        self.first, self.high = self.bend(xs[0]), high
        self.span = self.bend(xs[-1]) - self.first or 1.0

    def x(self, value: float) -> float:
        return round(LEFT + 10 + (self.bend(value) - self.first) / self.span * (WIDTH - LEFT - RIGHT - 20), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - max(value, 0.0) / self.high * (HEIGHT - BOTTOM - TOP), 1)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):g},{self.y(y):g}" for x, y in points) if points else ""

    def area(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float]) -> str:
        """Between two lines; of a single x, across the whole chart."""
        if len(xs) == 1:
            return f"M{LEFT},{self.y(high[0]):g}H{WIDTH - RIGHT}V{self.y(low[0]):g}H{LEFT}z"
        edge = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        return self.path(edge) + "z" if edge else ""


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Every model's colour and mark, the same in the page and in the PNG figures."""
    free = iter([color for color in COLORS if color not in {plotting.COLORS.get(name) for name in names}] * len(names))
    return {
        name: Look(plotting.COLORS.get(name) or next(free), *MARKS[i % len(MARKS)], is_control(name))
        for i, name in enumerate(names)
    }


def chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, unit: str, top: float | None = None,
    chance: Sequence[Sequence[tuple[float, float]]] = (),
) -> Chart:  # fmt: skip
    """Lines over a common x, and one band for the series of controls. unit: of x, beside the numbers of a point. top: of y;
    by default what all intervals need. chance: what guessing gives, as lines of (x, y)."""
    points = [point for line in series for point in line.points]
    xs = sorted({point.x for point in points})
    scale = _Scale(xs, top or max(point.y if point.high is None else point.high for point in points) * 1.05 or 1.0)
    controls = [line for line in series if line.look.control]
    drawn = [line for line in series if not line.look.control]
    band = _band(controls, scale) if controls else None
    texts = {(line.name, point.x): point.text for line in series for point in line.points}
    return Chart(
        title, f"{x_label} (log scale)" if scale.logarithmic else x_label, y_label,
        [_line(line, scale) for line in drawn], band, _columns(drawn, controls, xs, scale, unit),
        _x_ticks(xs, scale), [(scale.y(y), f"{y:g}") for y in _round(scale.high)], [unit, *(line.name for line in series)],
        [[f"{x:,g}", *(texts.get((line.name, x), "") for line in series)] for x in xs],
        [scale.path(line) if len(line) > 1 else f"M{LEFT},{scale.y(line[0][1]):g}H{WIDTH - RIGHT}" for line in chance],
    )  # fmt: skip


def bar(change: Estimate, bound: float, verdict: str) -> Bar:
    """A difference with its interval, as a mark on a line with zero in the middle."""
    low, value, high = (50 + 46 * max(-1.0, min(1.0, end / bound)) for end in (change.ci95[0], change.value, change.ci95[1]))
    return Bar(round(low, 1), round(value, 1), round(high, 1), verdict)


def minus(text: str) -> str:
    """Numbers as they are printed."""
    return text.replace("-", "\N{MINUS SIGN}")


def _line(series: Series, scale: _Scale) -> Line:
    points = sorted(series.points, key=lambda point: point.x)
    limits = [(scale.x(point.x), scale.y(point.low), scale.y(point.high)) for point in points
              if point.low is not None and point.high is not None]  # fmt: skip
    whiskers = "".join(f"M{x:g},{low:g}V{high:g}M{x - 3:g},{low:g}h6M{x - 3:g},{high:g}h6" for x, low, high in limits)
    return Line(
        series.name, series.look, scale.path([(point.x, point.y) for point in points]), whiskers,
        [(scale.x(point.x), scale.y(point.y)) for point in points],
    )  # fmt: skip


def _band(controls: Sequence[Series], scale: _Scale) -> Band:
    ends = _ends(controls)
    name = plotting.controls_label(len(controls))
    return Band(name, scale.area(list(ends), [low for low, _ in ends.values()], [high for _, high in ends.values()]))


def _ends(controls: Sequence[Series]) -> dict[float, tuple[float, float]]:
    """x -> the lowest and the highest control."""
    values: dict[float, list[float]] = {}
    for control in controls:
        for point in control.points:
            values.setdefault(point.x, []).append(point.y)
    return {x: (min(values[x]), max(values[x])) for x in sorted(values)}


def _columns(
    drawn: Sequence[Series], controls: Sequence[Series], xs: list[float], scale: _Scale, unit: str
) -> list[Column]:  # fmt: skip
    edges = [LEFT, *((scale.x(a) + scale.x(b)) / 2 for a, b in pairwise(xs)), WIDTH - RIGHT]
    ends = _ends(controls)
    columns = []
    for i, x in enumerate(xs):
        rows = [(point.y, line.name, point.text) for line in drawn for point in line.points if point.x == x]
        if x in ends:
            low, high = ends[x]
            text = f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"
            rows.append((high, plotting.controls_label(len(controls)), text))
        rows.sort(key=lambda row: -row[0])
        texts = [(name, text) for _, name, text in rows]
        columns.append(Column(edges[i], round(edges[i + 1] - edges[i], 1), scale.x(x), f"{x:,g} {unit}", texts))
    return columns


def _x_ticks(xs: list[float], scale: _Scale) -> list[tuple[float, str]]:
    """The values of x, but for those whose label would cover the one before."""
    ticks: list[tuple[float, str]] = []
    for x in xs:
        label = f"{x:,g}"
        if not ticks or scale.x(x) - ticks[-1][0] >= max(ROOM, 7 * len(label)):
            ticks.append((scale.x(x), label))
    return ticks


def _round(high: float) -> list[float]:
    """Round numbers from 0 to `high`, about five."""
    rough = high / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [i * step for i in range(int(high / step * 1.0001) + 1)]
