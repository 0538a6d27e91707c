"""Random heads of all layers, drawn from the seed: what any way of choosing has to beat."""

import numpy as np

from surgery.choosing.task import ChoiceTask, most_chosen
from surgery.records.plan import Plan

most = most_chosen


def choose(task: ChoiceTask) -> Plan:
    return task.chosen(task.units(np.random.default_rng(task.seed).permutation(task.graftable())))
