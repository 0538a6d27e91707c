"""The retrieval circuit in one picture: what gathers at the ends of records, what aggregates at the query, and what passes
between them."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from surgery.records.ranking import Edge, Ranking, Roles

INK, QUIET = "#24292f", "#6a7178"
GATHER, AGGREGATE = "#0072b2", "#d55e00"  # of Okabe and Ito's palette, safe for colour-blind readers
DRAWN = 4  # units of either role; those that cost most
LEAST = 0.05  # shares below it are not drawn
# In inches, as all places here are, so that nothing moves with the resolution:
WIDTH, MARGIN, LINE = 7.2, 0.2, 0.165
BETWEEN, MORE = 1.3, 0.05  # the rows, and for each arrow
LABEL = (0.22, 0.1)  # half of the room of a label
SPOTS = [0.12 + 0.02 * i for i in range(36)]  # of the way to its target, where an arrow's label may stand


class Box(NamedTuple):
    """A unit: its name and cost, its middle from the left, and its size."""

    text: str
    x: float
    width: float
    height: float


def draw_circuit(ranking: Ranking | None) -> Any | None:
    """A matplotlib figure of ranking.circuit; None where there is none, or no unit has a role.

    Above: the units that gather, with what it costs to ablate them at the ends of records. Below: those that aggregate, with
    what it costs at the query. Both from left to right by layer. An arrow's width and label say which share of a gather unit's
    cost passes through an aggregate unit.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    if ranking is None or (circuit := ranking.circuit) is None or not circuit.aggregate:
        return None
    costs: dict[str, Roles] = {each.name: each.roles for each in ranking.groups}
    costs |= {each.name: each.roles for each in ranking.heads if each.roles is not None}
    above = _spread([(name, max(costs[name].evidence.mean, costs[name].spans.mean)) for name in circuit.gather])
    below = _spread([(name, costs[name].query.mean) for name in circuit.aggregate])
    sentence = textwrap.wrap(circuit.sentence, 108)
    title = MARGIN + LINE * len(sentence) + 0.3  # the height of the lower row's
    low = title + 0.25 + max(box.height for box in below.values())
    edges = [e for e in circuit.edges if e.source in above and e.target in below and e.share >= LEAST]
    high = low + (BETWEEN + MORE * len(edges) if above else 0.2)
    top = high + max([box.height for box in above.values()], default=0)
    style: Any = {"font.size": 9.5, "text.color": INK, "text.parse_math": False, "svg.fonttype": "none"}
    with matplotlib.rc_context({**style, "figure.facecolor": "none", "axes.facecolor": "none"}):
        figure = Figure(figsize=(WIDTH, top + 0.5))
        axis = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, top + 0.5))
        axis.set_axis_off()
        upper = "gather, at the ends of records; nats: what ablating costs there"
        lower = "aggregate, at the query; %: the share of the cost above that passes"
        for boxes, units, color, y, what in (
            (above, circuit.gather, GATHER, top + 0.25, upper),
            (below, circuit.aggregate, AGGREGATE, title, lower),
        ):
            more = f" ({len(units) - DRAWN} more)" if len(units) > DRAWN else "" if units else " (none was found)"
            axis.text(MARGIN, y, what + more, color=color, weight="bold", va="center")
            for box in boxes.values():
                foot = high if boxes is above else low - box.height
                frame: Any = {"boxstyle": "round,pad=0,rounding_size=0.07", "fc": "none", "ec": color, "lw": 1.6}
                axis.add_patch(FancyBboxPatch((box.x - box.width / 2, foot), box.width, box.height, **frame))
                axis.text(box.x, foot + box.height / 2, box.text, ha="center", va="center", linespacing=1.25)
        _draw_edges(axis, edges, above, below, high - 0.04, low + 0.04)
        axis.text(MARGIN, MARGIN, "\n".join(sentence), fontsize=8.5, va="bottom", linespacing=1.25)
    return figure


def _spread(units: Sequence[tuple[str, float]]) -> dict[str, Box]:
    """The units that are drawn, those that cost most, in a row by layer."""
    from matplotlib.textpath import TextPath

    drawn = sorted(sorted(units, key=lambda unit: -unit[1])[:DRAWN], key=lambda unit: _layer(unit[0]))
    lines = {name: [*textwrap.wrap(name, 16, break_long_words=False), f"+{cost:.2f} nats"] for name, cost in drawn}
    widths = {
        name: max(TextPath((0, 0), line, size=9.5).get_extents().width for line in each) / 72 + 0.2
        for name, each in lines.items()
    }
    gap, boxes, x = (WIDTH - 2 * MARGIN - sum(widths.values())) / max(1, len(drawn)), {}, MARGIN
    for name, width in widths.items():
        boxes[name] = Box("\n".join(lines[name]), x + (gap + width) / 2, width, LINE * len(lines[name]) + 0.16)
        x += gap + width
    return boxes


def _draw_edges(
    axis: Any, edges: Sequence[Edge], above: dict[str, Box], below: dict[str, Box], high: float, low: float
) -> None:
    """Arrows from the feet of the upper boxes to the heads of the lower ones, each with a place of its own on a box's edge, and
    with its label where fewest other arrows and labels are."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for boxes, found, mine, other in ((above, begins, "source", "target"), (below, ends, "target", "source")):
        beyond = below if boxes is above else above
        for name, box in boxes.items():
            own = [number for number, edge in enumerate(edges) if getattr(edge, mine) == name]
            own.sort(key=lambda number: beyond[getattr(edges[number], other)].x)
            for place, number in enumerate(own, start=1):
                found[number] = box.x + box.width * (place / (len(own) + 1) - 0.5)
    labels: list[tuple[float, float]] = []
    near, depth = LABEL[1] / (high - low), high - low

    def at(number: int, t: float) -> float:
        return begins[number] + t * (ends[number] - begins[number])

    def crowd(number: int, t: float) -> float:
        """How many arrows and labels stand in the way of a label; as good as none, the one nearest to the middle."""
        x, y = at(number, t), high - t * depth
        others = [sorted((at(other, t - near), at(other, t + near))) for other in range(len(edges)) if other != number]
        away = [max(left - x, x - right) / LABEL[0] for left, right in others]
        lines = sum((each < 1) + 0.3 * (each < 2) for each in away)
        return lines + 3 * sum(abs(x - a) < 2 * LABEL[0] and abs(y - b) < 2 * LABEL[1] for a, b in labels) + abs(t - 0.4) / 9

    for number, edge in enumerate(edges):
        t, share = min(SPOTS, key=lambda t: crowd(number, t)), min(edge.share, 1.0)
        x, y = at(number, t), high - t * depth
        labels.append((x, y))
        room = min(near, LABEL[0] / max(abs(ends[number] - begins[number]), 1e-9))
        before, behind = ((at(number, s), high - s * depth) for s in (t - room, t + room))
        line: dict[str, Any] = {"color": QUIET, "lw": 0.8 + 2 * share}
        axis.plot([begins[number], before[0]], [high, before[1]], solid_capstyle="butt", **line)
        arrow = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0, **line}
        axis.annotate("", (ends[number], low), behind, arrowprops=arrow)
        axis.text(x, y, f"{share:.0%}", color=QUIET, fontsize=8.5, ha="center", va="center")


def _layer(name: str) -> tuple[int, bool]:
    """The layer that a name begins with, and whether it is heads: a convolution comes first."""
    digits = name[1:].partition(".")[0].partition(" ")[0]
    return int(digits), not name.endswith("convolution")
