"""What plan.heads=auto and plan.by=choice cost: the time of measuring one plan, and how many there are at most. What
plan.state_size costs: the time of a window of text, and how many there are."""

import math
from functools import partial

from surgery.jobs.costs.sample import Patient, Sample, moved, sampled
from surgery.locating.questions import asked
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.splicing.splice import install
from surgery.tuning.batches import held_out_windows
from surgery.tuning.bounded import Measuring
from surgery.tuning.choosing import most_measured
from surgery.tuning.growing import most_plans
from surgery.tuning.state_sizes import WINDOWS, state_scores


def growing_cost(patient: Patient, recipe: Recipe, chosen: Plan) -> tuple[int, Sample]:
    """(how many plans are measured at most, what that costs). Tried on a part of the questions and of the text. chosen: one of
    the plans."""
    auto, rows = recipe.plan.auto, patient.rows(recipe.locate.batch_size)
    tried = min(rows, auto.examples)
    _, questions_of = asked(patient.tokenizer, recipe.locate.probe, recipe.locate.options)
    questions = questions_of(max(2, tried), recipe.seed)
    windows = max(1, math.ceil(auto.windows * tried / auto.examples))
    text = held_out_windows(patient.tokenizer, recipe.data, recipe.tune, windows, recipe.seed)

    def one(depth: int) -> Sample:
        measuring = Measuring(patient.subject(depth), questions, text, rows)
        return sampled(partial(measuring.measure, [chosen if depth == patient.depth else moved(chosen, depth)], "a plan"))

    gates = len(auto.gates) if recipe.plan.blend is None else 1
    count = most_plans(auto, gates, patient.depth * patient.heads)
    if recipe.plan.by == "choice":
        count = most_measured(recipe.plan)
    each = patient.along(one)
    whole = Sample(each.seconds * auto.examples / tried, each.bytes * recipe.locate.batch_size / rows)
    return count, whole * count


def shrinking_cost(patient: Patient, recipe: Recipe, chosen: Plan) -> tuple[int, Sample]:
    """(how many windows of text the state is measured on, what that costs). Tried on one of them. chosen: where grafts are."""
    text = held_out_windows(patient.tokenizer, recipe.data, recipe.tune, 1, recipe.seed)

    def one(depth: int) -> Sample:
        hybrid = install(patient.subject(depth).model, chosen if depth == patient.depth else moved(chosen, depth))
        return sampled(lambda: state_scores(hybrid, *text))

    return WINDOWS, patient.along(one) * WINDOWS
