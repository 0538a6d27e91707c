"""The heads that gain most by themselves after a few steps of tuning, each tried alone, everything else as in the base: the
marginal gain of one graft, as arXiv 2512.20569 measures it for layers."""

from surgery.choosing.bounded import saved
from surgery.choosing.task import ChoiceTask, Most, most_chosen
from surgery.records.plan import Plan
from surgery.records.recipe import PlanOptions

MOST = 256  # units that are tuned one by one


def choose(task: ChoiceTask) -> Plan:
    """Every unit is tuned for plan.auto.steps steps under the smallest gate that is tried. What counts is what it then saves on
    questions and on text."""
    units = task.units(count=MOST)
    gate = task.gates[-1]
    tuned = task.measuring.measure(
        [task.plan([unit], gate) for unit in units], "plan, heads one by one", task.options.auto.steps
    )
    gains = [saved(task.before, each, task.options.auto.text_weight).value for each in tuned]
    return task.chosen([units[i] for i in sorted(range(len(units)), key=lambda i: -gains[i])])


def most(options: PlanOptions, heads: int, bounded: bool) -> Most:
    of_chosen, tried = most_chosen(options, heads, bounded), min(heads, MOST)
    return Most(of_chosen.plans + tried, of_chosen.tuned + tried)
