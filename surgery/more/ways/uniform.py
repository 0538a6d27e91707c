"""Heads spread evenly over the layers, one a layer before a second in any, the ranking's order within a layer: how hybrids are
designed from scratch."""

from surgery.choosing.task import ChoiceTask, most_chosen
from surgery.records.plan import Plan
from surgery.records.site import Site

most = most_chosen


def choose(task: ChoiceTask) -> Plan:
    units = task.units()
    layers = sorted({unit.layer for unit in units})
    count = min(task.options.counted, len(units))
    chosen: list[Site] = []
    while len(chosen) < count:
        left = [layer for layer in layers if any(unit.layer == layer for unit in units)]
        number = min(count - len(chosen), len(left))
        for layer in [left[(2 * i + 1) * len(left) // (2 * number)] for i in range(number)]:  # the middles of equal parts
            unit = next(unit for unit in units if unit.layer == layer)
            units.remove(unit)
            chosen.append(unit)
    return task.chosen(chosen)
