"""What tuning costs: a few real steps on the recipe's own batches, and how many there will be."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import mean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.jobs.costs import sample as sample_module
from surgery.jobs.costs.sample import Patient, Sample, extended, sampled
from surgery.records.recipe import Align, Calibrate, Data, Recipe, Tune
from surgery.splicing.splice import graft_parameters
from surgery.tuning.batches import BUFFER, loaders
from surgery.tuning.loop import started_run

STEPS = 2  # that are timed, after one that is not: it allocates memory and compiles kernels
ROWS = 256  # of a batch, whose tokens are counted; a larger batch has as many more as it has more rows
STATES = 4  # of a trained number, in float32: itself, its gradient, and Adam's two moments


@dataclass(frozen=True)
class Tuned:
    """What is tuned: a model, and of a control the numbers of its layers that are. sites: how many heads or layers are
    grafted, or how many layers are trained as they are."""

    model: PreTrainedModel
    layers: list[int] | None
    teacher: PreTrainedModel
    sites: int


@dataclass(frozen=True)
class StageCost:
    """steps: how many there are of each stage of tuning. sample: of all of them. trained: how many numbers are trained."""

    steps: dict[str, int]
    sample: Sample
    trained: int


def stages_of(options: Tune, control: bool = False) -> dict[str, int]:
    """The steps of each stage, for the early-stopped and for calibration the most that there can be. A control has nothing to
    align or to calibrate."""
    steps: dict[str, int] = {}
    if options.align is not None and not control:
        steps["align"] = options.align.steps
    if (search := options.calibrate) is not None and not control:
        steps["calibrate"] = 1 + sum(len(grid) + search.evaluations + 1 for grid in (search.tau, search.gate))
    if options.most_steps:
        steps["distil"] = options.most_steps
    return steps


def tuning_cost(
    patient: Patient, recipe: Recipe, make: Callable[[int, int], Tuned], first: int, whole: bool, sites: int
) -> StageCost:
    """make: from a number of layers and the first that is trained, what is tuned there, with weights of its own. first, sites
    (as Tuned has them): in the whole model. whole: at the depth of the whole model, `make` is tried at `first` alone."""
    few = _fewer(recipe.tune, patient)
    control = make(patient.depths[0], 0).layers is not None
    steps = stages_of(recipe.tune, control)
    costs: dict[tuple[int, int], dict[str, Sample]] = {}
    at_site = 0.0
    elsewhere: dict[int, Sample] = {}  # adapters: by the number of layers

    def cost(depth: int, at: int) -> dict[str, Sample]:
        nonlocal at_site
        if (depth, at) not in costs:
            tuned = make(depth, at)
            costs[depth, at], numbers = _stages(tuned, patient.tokenizer, recipe, few, steps)
            own = numbers if control else sum(p.numel() for p in graft_parameters(tuned.model).values())
            at_site, elsewhere[depth] = own / tuned.sites, Sample(0.0, max(0, numbers - own))
        return costs[depth, at]

    result = Sample()
    for stage, count in steps.items():
        if whole:
            each = cost(patient.depth, first)[stage]
        else:  # a layer below the first that is trained has a forward alone, one above it a backward too
            small, large = patient.depths
            below = large - small
            lowest = extended([(depth, cost(depth, 0)[stage]) for depth in patient.depths], patient.depth)
            higher = cost(large, below)[stage]
            saved = [max(0.0, a - b) / below for a, b in _pairs(cost(large, 0)[stage], higher)]
            each = Sample(lowest.seconds - saved[0] * first, lowest.bytes - saved[1] * first)
        result += each * count
    numbers = round(at_site * sites + (extended(sorted(elsewhere.items()), patient.depth).bytes if elsewhere else 0.0))
    fixed = STATES * 4 * numbers
    return StageCost(steps, Sample(result.seconds, result.bytes + fixed), numbers)


def _pairs(a: Sample, b: Sample) -> list[tuple[float, float]]:
    return [(a.seconds, b.seconds), (a.bytes, b.bytes)]


def _fewer(options: Tune, patient: Patient) -> Tune:
    """The options with as many rows as are tried."""
    rows = {name: patient.rows(size) for name in ("batch_size", "text_batch_size") if (size := getattr(options, name))}
    parts = min(options.gradient_accumulation_steps, rows["batch_size"])
    return options.model_copy(update={**rows, "gradient_accumulation_steps": parts})


def _stages(
    tuned: Tuned, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, few: Tune, steps: dict[str, int]
) -> tuple[dict[str, Sample], int]:
    """(a step of each stage on full batches, how many numbers are trained). Memory: without what is kept of each number."""
    result: dict[str, Sample] = {}
    numbers = 0

    def run(**changes: Any) -> Sample:
        nonlocal numbers
        nothing: dict[str, Any] = dict.fromkeys(("align", "calibrate", "early_stopping", "repeat"))
        options = few.model_copy(update={**nothing, "curriculum": 0.0, "report_to": (), **changes})
        times: list[float] = []
        numbers_of: list[int] = []

        def note_time(_: int) -> tuple[dict[str, float], bool]:
            times.append(sample_module.clock())
            return {}, False

        def work() -> None:
            with started_run(
                tuned.model, tokenizer, options, data=recipe.data, seed=recipe.seed, layers=tuned.layers, teacher=tuned.teacher,
                description="a few steps",
            ) as started:  # fmt: skip
                numbers_of.append(sum(p.numel() for p in started.trained.values()))
                if options.early_stopping is None and options.steps != "auto" and "distil" in started.stages:
                    started.distil(note_time)
                else:
                    started.finish_stages()

        sample = sampled(work, repeat=False)
        numbers = numbers_of[0]
        held = max(0.0, sample.bytes - STATES * 4 * numbers)
        if len(times) < 2:
            return Sample(sample.seconds, held)
        each = (times[-1] - times[0]) / (len(times) - 1)
        # What comes once, before the first step and in it, is spread over the recipe's steps.
        return Sample(each + max(0.0, sample.seconds - each * len(times)) / recipe.tune.most_steps, held)

    most_steps = recipe.tune.most_steps
    if "distil" in steps:
        each, (usual, most, tried) = run(steps=STEPS + 1), _tokens(tokenizer, recipe.tune, few, recipe.data, recipe.seed)
        result["distil"] = Sample(each.seconds * usual / tried, each.bytes * most / tried)
        if (stopping := recipe.tune.early_stopping) is not None:
            # One step with what is measured before the first, after the last, and of the base.
            watched = run(steps=1, early_stopping=stopping.model_copy(update={"eval_steps": 1}))
            times = 2 + -(-most_steps // stopping.eval_steps)
            extra = max(0.0, watched.seconds - each.seconds) / 3 * times
            result["distil"] += Sample(extra / most_steps, watched.bytes)
        if recipe.tune.steps == "auto":
            # One step with what is measured before and after it.
            looked = run(steps="auto", max_steps=1)
            times = 1 + -(-most_steps // recipe.tune.auto.eval_steps)
            extra = max(0.0, looked.seconds - each.seconds) / 2 * times
            result["distil"] += Sample(extra / most_steps, looked.bytes)
    factor = recipe.tune.batch_size / few.batch_size
    if (align := recipe.tune.align) is not None and "align" in steps:
        short, longer = (run(steps=0, align=_short(align, count)) for count in (1, 3))
        step = max(0.0, longer.seconds - short.seconds) / 2
        states = max(0.0, short.seconds - step) * align.batches / max(1, align.steps)
        result["align"] = Sample((step + states) * factor, longer.bytes * factor)
    if (search := recipe.tune.calibrate) is not None and "calibrate" in steps:
        batches = -(-search.examples // recipe.tune.batch_size)
        once = Calibrate(**search.model_dump() | {"tau": (1.0,), "gate": (0.5,), "evaluations": 0, "examples": few.batch_size})
        tried_times = stages_of(recipe.tune.model_copy(update={"calibrate": once, "align": None}))["calibrate"]
        sample = run(steps=0, calibrate=once)
        result["calibrate"] = Sample(sample.seconds / tried_times * batches * factor, sample.bytes * factor)
    return result, numbers


def _short(align: Align, steps: int) -> Align:
    return align.model_copy(update={"batches": 1, "steps": steps})


def _tokens(tokenizer: PreTrainedTokenizerBase, options: Tune, few: Tune, data: Data, seed: int) -> tuple[float, float, float]:
    """Tokens in a step: (the mean of the recipe's first steps, their most, the mean of the steps that are timed)."""

    def counts(of: Tune, steps: int) -> list[float]:
        sizes = {"batch_size": min(of.batch_size, ROWS), "text_batch_size": min(of.text_batch_size, ROWS)}
        batches = zip(*loaders(tokenizer, of.model_copy(update={"steps": steps, **sizes}), data, seed, 0), strict=False)
        lessons, texts = of.batch_size / sizes["batch_size"], of.text_batch_size / max(1, sizes["text_batch_size"])
        return [
            lesson[0].numel() * lessons + (0 if text is None else text[0].numel() * texts)
            for lesson, text in islice(batches, steps)
        ]

    whole, tried = counts(options, min(options.most_steps, BUFFER)), counts(few, STEPS + 1)
    return mean(whole), max(whole), mean(tried[1:])


def held_beyond(models: list[PreTrainedModel], base: PreTrainedModel) -> int:
    """The bytes that models hold together and the base does not."""
    own = {tensor.untyped_storage().data_ptr() for tensor in _tensors(base)}
    others = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for model in models for t in _tensors(model)}
    return sum(size for place, size in others.items() if place not in own)


def _tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    return [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
