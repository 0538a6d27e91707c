"""The heads whose gates lower the probe's loss fastest where they begin to open (splice attribution), whatever exact
measurements say."""

import numpy as np

from surgery.choosing.task import ChoiceTask, most_chosen
from surgery.records.plan import Plan

most = most_chosen


def choose(task: ChoiceTask) -> Plan:
    """Of all heads: one forward and one backward pass have measured them."""
    return task.chosen(task.units(np.argsort(-task.measured("attribution"), kind="stable")))
