"""Successive halving: many plans, tuned for a few steps; the better half for twice as many, and so on, until
plan.auto.finalists are left. What is best untrained need not be best after tuning."""

from surgery.choosing.bounded import saved
from surgery.choosing.task import ChoiceTask, Most, counts, gate_count
from surgery.records.plan import Plan
from surgery.records.recipe import PlanOptions
from surgery.records.site import Site
from surgery.runtime.progress import say

LAYERS = 8  # in which plans of one layer are tried: those with the leading heads
FEWEST = 4  # steps of the first round


def choose(task: ChoiceTask) -> Plan:
    """Plans: the leading heads of all layers and of each layer alone, as many as plan.heads says (heads: auto, half of these
    and one as well), under every gate. In each round a plan within the bounds goes before one that is beyond them."""
    auto = task.options.auto
    plans = [task.plan(heads, gate) for heads in _sets(task) for gate in task.gates]
    steps = FEWEST
    while len(plans) > auto.finalists and steps < auto.steps:
        tuned = task.measuring.measure(plans, f"plan, {len(plans)} plans after {steps} steps", steps)
        gains = [saved(task.before, each, auto.text_weight).value for each in tuned]
        beyond = [bool(task.bounds.beyond(each)) for each in tuned]
        order = sorted(range(len(plans)), key=lambda i: (beyond[i], -gains[i]))
        plans = [plans[i] for i in order[: max(auto.finalists, -(-len(plans) // 2))]]
        say(f"plan: after {steps} steps the best of {len(tuned)} saves {gains[order[0]]:+.3f} nats")
        steps *= 2
    return task.decided(plans)


def _sets(task: ChoiceTask) -> list[tuple[Site, ...]]:
    """The sets of heads, each once."""
    units, options = task.units(), task.options
    layers = [*dict.fromkeys(unit.layer for unit in units)][:LAYERS]  # as their leading heads lead
    sets: dict[tuple[Site, ...], None] = {}
    for count in counts(options.counted) if options.grows else [options.counted]:
        sets[tuple(units[:count])] = None
        for layer in layers:
            sets[tuple([unit for unit in units if unit.layer == layer][:count])] = None
    return [*sets]


def most(options: PlanOptions, heads: int, bounded: bool) -> Most:
    left = gate_count(options) * (LAYERS + 1) * (len(counts(options.counted)) if options.grows else 1)
    plans = tuned = 0
    steps = FEWEST
    while left > options.auto.finalists and steps < options.auto.steps:
        plans, tuned, steps = plans + left, tuned + left, 2 * steps
        left = max(options.auto.finalists, -(-left // 2))
    return Most(1 + plans + left + options.auto.finalists, tuned + (options.auto.finalists if bounded else 0))
