"""Random heads of the layer that holds the leading head, drawn from the seed: how much of a choice is the layer's alone."""

import numpy as np

from surgery.choosing.task import ChoiceTask, most_chosen
from surgery.records.plan import Plan

most = most_chosen


def choose(task: ChoiceTask) -> Plan:
    """Fewer than plan.heads says, where the layer has no more."""
    heads, graftable = task.ranking.columns, task.graftable()
    leading = next(i for i in heads.order() if i in {*graftable.tolist()})
    of_layer = graftable[heads.layer[graftable] == heads.layer[leading]]
    return task.chosen(task.units(np.random.default_rng(task.seed).permutation(of_layer)))
