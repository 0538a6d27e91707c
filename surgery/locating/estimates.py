"""From the columns of what was measured to estimates with intervals, of all heads."""

import numpy as np

from surgery.locating.stability import ScoreColumn
from surgery.statistics import LEVEL, Intervals, changed_decisions, intervals

DECISIONS = ("ablation_drop", "splice_gain")  # scores that are differences of right and wrong answers
SHARES = ("answer_mass", "pair_mass")


def estimated(name: str, column: ScoreColumn, level: float = LEVEL) -> Intervals:
    """Of a score, those of the heads that were measured."""
    value, low, high, n = intervals(column.values, decisions=are_decisions(name, column.values), level=level)
    if name in SHARES and level == LEVEL:
        low, high = np.maximum(low, 0), np.minimum(high, 1)
    return Intervals(value, low, high, n)


def are_decisions(name: str, values: np.ndarray) -> bool:
    """Whether a score is of single decisions; of a row of text, several are right or wrong."""
    return name in DECISIONS and changed_decisions(values)


def everywhere(part: Intervals, at: np.ndarray | None, count: int) -> Intervals:
    """The intervals of some heads among all."""
    if at is None:
        return part
    ends, n = np.full((3, count), np.nan), np.zeros(count, dtype=int)
    ends[:, at], n[at] = part[:3], part.n
    return Intervals(ends[0], ends[1], ends[2], n)
