"""What the bench costs: a batch of every task is measured, and every context; the rest follows from their sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.evaluation.contexts import readable
from surgery.evaluation.report import is_loss
from surgery.evaluation.speed import decode_cost, decode_forwards, speed
from surgery.evaluation.suites import WINDOW_ROWS, Task, standard, tasks
from surgery.jobs.costs.sample import Patient, Sample, extended, sampled, total
from surgery.loading.digests import conditions
from surgery.records.recipe import Bench, Recipe

COUNTED = 10_000  # examples of a task that are made; how many more cost is extended from these
LONG = 512  # tokens: longer contexts of a model that is not tried whole are extended from half of this and this

Kind = str  # of a model: "base", or "hybrid"


@dataclass(frozen=True)
class BenchCost:
    """forwards: of each model; None where a task of the harness makes some, or there are very many. of: what one model
    of each kind costs. sample: all models together."""

    forwards: int | None
    of: dict[Kind, Sample]
    sample: Sample


def bench_forwards(options: Bench, todo: list[Task], contexts: list[int]) -> int | None:
    """How many forwards every model makes; None where the harness makes some."""
    if any(task.shapes is None for task in todo) or "speed" in options.suites:
        return None
    timed = len(contexts) * decode_forwards() if "quick" in options.suites else 0
    return timed + sum(len(task.shapes()) for task in todo if task.shapes)


def bench_cost(
    patient: Patient, recipe: Recipe, kinds: Mapping[Kind, Callable[[int], PreTrainedModel]], entries: Mapping[str, Kind],
    quick: bool = False,
) -> BenchCost:  # fmt: skip
    """kinds: from a number of layers to a model of the kind. entries: the kind of every model that is measured. quick: hybrids
    alone are tried, on fewer examples, and nothing is counted."""
    options, tokenizer = recipe.bench, patient.tokenizer
    rows = patient.rows(options.batch_size)
    rows = max(1, min(rows, options.batch_size // 8)) if quick else rows
    few = options.model_copy(
        update={
            "limit": max(2, rows), "batch_size": rows, "task_limit": min(rows, options.task_limit or rows), "seeds": 1,
            "windows": max(1, min(options.windows, rows // WINDOW_ROWS)),
        }
    )  # fmt: skip
    contexts = readable(options, tokenizer)
    samples = tasks(few, tokenizer, recipe.data, recipe.seed)
    tried = {(task.name, task.part): task for task in samples}
    # All examples of all tasks take a while to be made; their number is known where the harness does not say it.
    counted = options.model_copy(update={"limit": min(options.limit, COUNTED)})
    todo = samples if quick and not standard(options) else tasks(counted, tokenizer, recipe.data, recipe.seed)
    of: dict[Kind, Sample] = {}
    for kind, make in kinds.items():
        if kind not in entries.values():
            continue
        models = {depth: make(depth) for depth in patient.depths}
        parts = []
        rates: dict[tuple[str, str], Sample] = {}
        for task in todo:
            key = (task.name, task.part)
            if key not in rates:
                rates[key] = patient.along(partial(_asked, tried[key], models))
            if todo is samples:
                sizes = (options.windows, few.windows) if is_loss(task.name) else (options.limit, few.limit)
                times = sizes[0] / sizes[1] if task.count == sizes[1] else 1.0
                parts.append(Sample(rates[key].seconds * times * options.seeds, rates[key].bytes * options.batch_size / rows))
            else:
                # A task that has as many examples as it may have goes on in the same way.
                more = options.limit / counted.limit if task.count == counted.limit and not is_loss(task.name) else 1.0
                parts.append(_whole(rates[key], task, tried[key]) * more)
        parts += _timed(patient, options, contexts, models, quick)
        parts.append(patient.along(partial(_read, tokenizer, models)))
        of[kind] = total(parts)
    return BenchCost(
        None if quick or counted.limit < options.limit else bench_forwards(options, todo, contexts),
        of,
        total([of[kind] for kind in entries.values()]),
    )


def _whole(sample: Sample, task: Task, tried: Task) -> Sample:
    """From a part of a task to all of it."""
    if task.shapes is None or tried.shapes is None:
        return Sample(sample.seconds * task.count / max(1, tried.count), sample.bytes)
    whole, part = task.shapes(), tried.shapes()
    tokens, most = (sum(r * t for r, t in whole), max(r * t for r, t in whole))
    own, largest = (sum(r * t for r, t in part), max(r * t for r, t in part))
    return Sample(sample.seconds * tokens / own, sample.bytes * most / largest)


def _timed(patient: Patient, options: Bench, contexts: list[int], models: "ByDepth", quick: bool) -> list[Sample]:
    """What timing tokens costs. Its memory is that of one model's caches, which hold next to nothing of a state-space model."""
    jobs: list[tuple[int, Job]] = []
    if "quick" in options.suites:
        jobs += [(context, decode_cost) for context in contexts]
    if "speed" in options.suites:
        jobs += [(context, _speed_of(batch)) for context in contexts for batch in options.batches]
    result = []
    for context, job in jobs:
        longest = LONG // 4 if quick else LONG
        few = context <= (longest if quick or not patient.is_whole else 8 * LONG)
        sizes = [context] if few else [longest // 2, longest]

        result.append(patient.along(partial(_at_context, job, models, sizes, context)))
    return result


Job = Callable[[Mapping[str, Any], int], Any]
ByDepth = Mapping[int, PreTrainedModel]  # by number of layers


def _asked(task: Task, models: ByDepth, depth: int) -> Sample:
    return sampled(lambda: task.measure(models[depth]))


def _read(tokenizer: PreTrainedTokenizerBase, models: ByDepth, depth: int) -> Sample:
    """The weights are read for what identifies them."""
    return sampled(lambda: conditions(models[depth], tokenizer), repeat=False)


def _at_context(job: Job, models: ByDepth, sizes: list[int], context: int, depth: int) -> Sample:
    """A job of one context, from those that are tried."""
    tried = [(size, sampled(partial(job, {"model": models[depth]}, size), repeat=False)) for size in sizes]
    return extended(tried, context)


def _speed_of(batch: int) -> Job:
    return lambda models, context: speed(models, context, batch)
