"""Figures of lines as PNG files, by matplotlib."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from surgery.figures import plotting
from surgery.figures.lines import Figure, Series

WIDTH, PANEL = 7.0, 2.9  # inches
LETTERS, DIGITS = 72, 60  # of a title's line; of an axis
LABEL = 0.085  # the height of a label, as a share of the axis


def draw_lines(figures: Sequence[Figure], path: Path) -> None:
    """One below the other. The title of each says its result; its lines have their names at their ends. Controls are thin and
    grey, but for the best one."""
    height = PANEL * len(figures) + 0.4 * (len(figures) == 1)
    with plotting.drawing(path, len(figures), height=height, width=WIDTH) as (_, axes):
        for axis, figure in zip(axes[:, 0], figures, strict=True):
            _draw(axis, figure)


def _draw(axis: Any, figure: Figure) -> None:
    best, labels = figure.best_control, list[tuple[float, float, str, str]]()
    others = [line for line in figure.series if line.look.control and line is not best]
    for line in (*others, *(line for line in reversed(figure.series) if line not in others)):
        if line in others:
            _draw_line(axis, line, whiskers=False, ls="--", color=plotting.OTHERS, lw=1, marker="")
        else:
            style = {"color": line.look.color, "marker": line.look.marker, "ls": "--" if line.look.control else "-"}
            _draw_line(axis, line, whiskers=True, **style)
            labels.append(
                (line.points[-1].x, line.points[-1].y, plotting.shown(line.name) + " (best)" * (line is best), line.look.color)
            )
    if others:
        middle = sorted((line.points[-1] for line in others), key=lambda point: point.y)[len(others) // 2]
        labels.append((middle.x, middle.y, plotting.controls_label(len(others), best is not None), plotting.CHANCE))
    if figure.chance:
        xs, ys = ([x for x, _ in figure.chance], [y for _, y in figure.chance])
        axis.plot(xs, ys, color=plotting.CHANCE, lw=1.2, ls=(0, (1, 2)), zorder=1.5, marker="." if len(xs) == 1 else "")
        labels.append((xs[-1], ys[-1], "chance", plotting.CHANCE))
    foot, top = figure.span
    x_label = figure.x_label + " (log scale)" * figure.logarithmic
    axis.set(xlabel=x_label, ylabel=figure.quantity, ylim=(foot, top + 0.02 * (top - foot)))
    if figure.logarithmic:
        axis.set_xscale("log", base=2)
    ticks = figure.ticks(DIGITS)
    axis.set_xticks([x for x, _ in ticks], [label for _, label in ticks])
    axis.set_xticks([], minor=True)
    what, _, told = figure.result.partition(": ")
    whole = len(figure.result) <= LETTERS
    axis.set_title(figure.result if whole else f"{what}:\n{textwrap.fill(told, LETTERS)}")
    name_lines(axis, labels)


def name_lines(axis: Any, labels: Sequence[tuple[float, float, str, str]], size: float = LABEL) -> None:
    """Write names beside the ends of lines, right of the axis: (x, y, text, colour) of each. size: the height of a label, as a
    share of the axis, whose limits are final."""
    low, high = axis.get_ylim()
    heights = spread([(y - low) / (high - low) for _, y, _, _ in labels], size)
    for (x, y, text, color), place in zip(labels, heights, strict=True):
        leader = {"arrowstyle": "-", "color": color, "lw": 0.6, "shrinkA": 2, "shrinkB": 4, "relpos": (0, 0.5)}
        axis.annotate(
            text, (x, y), (1.04, place), textcoords="axes fraction", color=color, va="center", fontsize=9.5,
            arrowprops=leader, annotation_clip=False,
        )  # fmt: skip


def _draw_line(axis: Any, line: Series, *, whiskers: bool, **style: Any) -> None:
    points = line.points
    intervals = [
        (point.y if point.low is None else point.low, point.y if point.high is None else point.high) for point in points
    ]
    plotting.draw_line(axis, [p.x for p in points], [p.y for p in points], intervals if whiskers else None, **style)


def spread(places: Sequence[float], least: float) -> list[float]:
    """Places on a line from 0 to 1, moved apart so that each has `least` to the next, and as little as that needs."""
    order, steps = np.argsort(places, kind="stable"), least * np.arange(len(places))
    # Without the steps between them they need only keep their order.
    kept = isotonic_regression(np.array(places)[order] - steps).x
    result = np.empty(len(places))
    result[order] = kept.clip(0, max(0.0, 1 - steps[-1])) + steps
    return result.tolist()
