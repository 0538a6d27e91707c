"""The last layers' heads, the ranking's order within a layer: a rule that looks at the layer alone."""

from surgery.choosing.task import ChoiceTask, most_chosen
from surgery.records.plan import Plan

most = most_chosen


def choose(task: ChoiceTask) -> Plan:
    return task.chosen(sorted(task.units(), key=lambda unit: -unit.layer))  # stable: the ranking's order within a layer
