"""The heads whose ablation costs the probe most, as aggregation heads are found in the literature (arXiv 2602.11374)."""

import numpy as np

from surgery.choosing.task import ChoiceTask, most_chosen
from surgery.records.plan import Plan

most = most_chosen


def choose(task: ChoiceTask) -> Plan:
    """Of the heads that locate has ablated: all, with locate.exact=true."""
    return task.chosen(task.units(np.argsort(-task.measured("ablation_loss"), kind="stable")))
