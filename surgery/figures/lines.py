"""One description of a figure of lines, from which the page draws it (charts.py) and files are drawn (plots.py)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surgery.figures import plotting
from surgery.records.names import is_control

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
    """points: at least one, in the order of x."""

    name: str
    look: Look
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Figure:
    """Lines over a common x. unit: of x, beside the numbers of a point. quantity: of y. written: how a value of y is written.
    top: of y; None: what all intervals need. from_zero: whether y begins at 0, or where the lowest interval does. chance: what
    guessing gives, as (x, y). falls: less is better."""

    title: str
    x_label: str
    unit: str
    quantity: str
    series: tuple[Series, ...]
    written: str = "{:.3f}"
    top: float | None = None
    chance: tuple[tuple[float, float], ...] = ()
    falls: bool = False
    from_zero: bool = True

    @property
    def xs(self) -> list[float]:
        """Every x, in order."""
        return sorted({point.x for line in self.series for point in line.points})

    @property
    def logarithmic(self) -> bool:
        """Whether x is drawn by its logarithm."""
        return self.xs[0] > 0 and self.xs[-1] > LOGARITHMIC * self.xs[0]

    @property
    def span(self) -> tuple[float, float]:
        """The foot and the top of y."""
        points = [point for line in self.series for point in line.points]
        low = min(point.y if point.low is None else point.low for point in points)
        high = max(point.y if point.high is None else point.high for point in points)
        margin = 0.05 * (high if self.from_zero else high - low)
        return 0.0 if self.from_zero else low - margin, self.top or high + margin or 1.0

    def rise(self, y: float) -> float:
        """How far y lies from the foot to the top, from 0 to 1."""
        foot, top = self.span
        return max(y - foot, 0.0) / ((top - foot) or 1.0)

    def share(self, x: float) -> float:
        """How far x lies from the first to the last, from 0 to 1."""
        first, last, here = (math.log2(each) if self.logarithmic else each for each in (self.xs[0], self.xs[-1], x))
        return (here - first) / ((last - first) or 1.0)

    def ticks(self, width: float) -> list[tuple[float, str]]:
        """The values of x with their labels, without those whose label would touch the one before. width: of the axis, in
        widths of a digit. The last one always has its label."""
        ticks: list[tuple[float, str]] = []
        for x in self.xs:
            label = f"{x:,g}"
            while ticks and (self.share(x) - self.share(ticks[-1][0])) * width < (len(label) + len(ticks[-1][1])) / 2 + 1:
                if x != self.xs[-1]:
                    break
                ticks.pop()
            else:
                ticks.append((x, label))
        return ticks

    @property
    def best_control(self) -> Series | None:
        """The control that does best at the last x."""
        return self._best([line for line in self.series if line.look.control])

    @property
    def result(self) -> str:
        """What the figure says: the best hybrid, the base (the first line) and the best control, at the last x."""
        lines = [line for line in self.series if not line.look.control]
        best, control = self._best(lines[1:]), self.best_control
        told = [(line.name, line) for line in (best, lines[0]) if line is not None]
        told += [("the best control", control)] if control is not None else []
        if any(line.points[-1].x != self.xs[-1] for _, line in told):  # each ends where it ends
            ends = [(plotting.shown(name), line.points[-1]) for name, line in told]
            each = (f"{name} {self.written.format(point.y)} at {point.x:,g} {self.unit}" for name, point in ends)
            return f"{self.title}: {', '.join(each)}"
        values = ", ".join(f"{plotting.shown(name)} {self.written.format(line.points[-1].y)}" for name, line in told)
        return f"{self.title} at {self.xs[-1]:,g} {self.unit}: {values}"

    def _best(self, lines: Sequence[Series]) -> Series | None:
        there = [line for line in lines if line.points and line.points[-1].x == self.xs[-1]]
        return (min if self.falls else max)(there, key=lambda line: line.points[-1].y, default=None)


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Every model's colour and mark, the same in all figures."""
    free = iter([color for color in COLORS if color not in {plotting.COLORS.get(name) for name in names}] * len(names))
    return {
        name: Look(plotting.COLORS.get(name) or next(free), *MARKS[i % len(MARKS)], is_control(name))
        for i, name in enumerate(names)
    }
