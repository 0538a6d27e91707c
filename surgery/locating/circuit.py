"""The retrieval circuit in one picture: what gathers at the ends of records, what aggregates at the query, and what passes
between them."""

import textwrap
from typing import Any

from surgery.records.ranking import Ranking, Roles

INK, QUIET = "#24292f", "#6a7178"
GATHER, AGGREGATE = "#0072b2", "#d55e00"  # of Okabe and Ito's palette, safe for colour-blind readers
DRAWN = 4  # units of either role; those that cost most
GATHER_ROW, AGGREGATE_ROW = 1.0, 0.0
NEAR = 0.26  # of the way to its target stands an arrow's label: near its source, where arrows have not crossed yet


def draw_circuit(ranking: Ranking) -> Any | None:
    """A matplotlib figure of ranking.circuit; None where no unit has a role.

    Above: the units that gather, with what it costs to ablate them at the ends of records. Below: those that aggregate, with
    what it costs at the query. Both from left to right by layer. An arrow's width and label say which share of a gather unit's
    cost passes through an aggregate unit.
    """
    import matplotlib
    from matplotlib.figure import Figure

    circuit = ranking.circuit
    if circuit is None or not circuit.aggregate:
        return None
    costs: dict[str, Roles] = {each.name: each.roles for each in ranking.groups}
    costs |= {each.name: each.roles for each in ranking.heads if each.roles is not None}
    rows = {
        GATHER_ROW: [(name, max(costs[name].evidence.mean, costs[name].spans.mean)) for name in circuit.gather],
        AGGREGATE_ROW: [(name, costs[name].query.mean) for name in circuit.aggregate],
    }
    style: Any = {"font.size": 9.5, "text.color": INK, "text.parse_math": False, "svg.fonttype": "none"}
    with matplotlib.rc_context({**style, "figure.facecolor": "none", "axes.facecolor": "none"}):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axis = figure.add_subplot()
        axis.set(xlim=(-0.02, 1.02), ylim=(-0.85, 1.4))
        axis.set_axis_off()
        places = {(row, name): x for row, units in rows.items() for name, x in _spread(units)}
        boxes: dict[tuple[float, str], Any] = {}
        titles = {GATHER_ROW: "gather, at the ends of records", AGGREGATE_ROW: "aggregate, at the query"}
        for row, color in ((GATHER_ROW, GATHER), (AGGREGATE_ROW, AGGREGATE)):
            title = titles[row]
            hidden = max(0, len(rows[row]) - DRAWN)
            title += f" (and {hidden} more)" if hidden else "" if rows[row] else ": none was found"
            axis.text(0, row + (0.3 if row == GATHER_ROW else -0.3), title, color=color, weight="bold", va="center")
            for name, cost in rows[row]:
                if (row, name) in places:
                    text = f"{name}\n+{cost:.2f} nats"
                    box = {"boxstyle": "round,pad=0.45", "fc": "white", "ec": color, "lw": 1.6}
                    drawn = axis.text(places[row, name], row, text, ha="center", va="center", bbox=box, zorder=3)
                    boxes[row, name] = drawn.get_bbox_patch()
        figure.draw_without_rendering()  # boxes get their sizes, and arrows end at their edges
        for edge in circuit.edges:
            source, target = (GATHER_ROW, edge.source), (AGGREGATE_ROW, edge.target)
            if source not in places or target not in places or edge.share < 0.05:
                continue
            share, begin, end = min(edge.share, 1.0), places[source], places[target]
            arrow = {
                "arrowstyle": "-|>",
                "mutation_scale": 13,
                "lw": 0.8 + 2 * share,
                "color": QUIET,
                "shrinkA": 3,
                "shrinkB": 3,
            }
            arrow |= {"patchA": boxes[source], "patchB": boxes[target]}
            axis.annotate("", (end, AGGREGATE_ROW), (begin, GATHER_ROW), arrowprops=arrow, zorder=1)
            x, y = begin + NEAR * (end - begin), GATHER_ROW + NEAR * (AGGREGATE_ROW - GATHER_ROW)
            box = {"fc": "white", "ec": "none", "pad": 1}
            axis.text(x, y, f"{share:.0%}", color=QUIET, fontsize=8.5, ha="center", va="center", zorder=2, bbox=box)
        axis.text(0, -0.65, textwrap.fill(circuit.sentence, 100), color=INK, fontsize=8.5, va="center")
    return figure


def _spread(units: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The units that are drawn, those that cost most, each with its place from 0 to 1, by layer."""
    drawn = sorted(sorted(units, key=lambda unit: -unit[1])[:DRAWN], key=lambda unit: _layer(unit[0]))
    return [(name, (i + 0.5) / len(drawn)) for i, (name, _) in enumerate(drawn)]


def _layer(name: str) -> tuple[int, bool]:
    """The layer that a name begins with, and whether it is heads: a convolution comes first."""
    digits = name[1:].partition(".")[0].partition(" ")[0]
    return int(digits), not name.endswith("convolution")
