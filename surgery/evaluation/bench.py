"""Measure models side by side: the same examples for all, paired differences to the first."""

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.cells import Cell, check_same, kept, values
from surgery.evaluation.contexts import readable
from surgery.evaluation.decoding import Timed, Timing, here
from surgery.evaluation.entries import Entry, ModelPool
from surgery.evaluation.report import Report
from surgery.evaluation.results import ModelReport, Perplexity
from surgery.evaluation.suites import check, having, pooled, tasks, timings
from surgery.evaluation.task import Task
from surgery.loading.digests import Conditions, fingerprint, tokenizer_digest
from surgery.loading.opened import Checkpoint, model_of, tokenizer_of
from surgery.models.cache import decodes
from surgery.models.finite import within
from surgery.probes.knowledge import Knowledge, Letters
from surgery.records.names import display_name, strip_paths
from surgery.records.plan import published
from surgery.records.recipe import Bench, Data
from surgery.records.record import provenance
from surgery.runtime.memory import keep_apart
from surgery.runtime.processes import gather, is_main, share, state
from surgery.runtime.progress import Track, busy, say
from surgery.splicing.remembered import opened, remembered_tokenizer
from surgery.statistics import Estimate, Evidence, Proportion, decisions, difference, evidence, mean, proportion
from surgery.world.tokenizer import is_of_the_world, say_of_the_world


def bench(
    base: Mapping[str, "Entry | PreTrainedModel | Checkpoint"] | PreTrainedModel | Checkpoint,
    *others: PreTrainedModel | Checkpoint | PreTrainedTokenizerBase | Bench,
    tokenizer: PreTrainedTokenizerBase | None = None,
    options: Bench | None = None,
    data: Data | None = None,
    seed: int = 0,
    cells: Path | None = None,
) -> Report:
    """Measure models on the same examples: bench(base, hybrid, ...), or bench({"base": base, "any name": hybrid, ...}).

    Each model is one of transformers or what load() returned; the first is what the others are compared with. tokenizer: unless
    it is given, by name or by position, that of the first model which load() has opened. options: what is measured. cells and
    seed: as for measure(). The Report prints as a table with its verdict; `show()` shows its page in a notebook. Nothing is
    trained here: a control is a model called control_tuned, as in a run's report, and without one no verdict is "yes".

    Raises UserError for arguments of another type, for models with another tokenizer than the base's, for a suite whose data or
    package is missing, and if two models were not asked the same.
    """
    models = [value for value in others if not isinstance(value, PreTrainedTokenizerBase | Bench)]
    for value in others:
        if isinstance(value, PreTrainedTokenizerBase):
            tokenizer = value
        elif isinstance(value, Bench):
            options = value
    named = dict(base) if isinstance(base, Mapping) else _named([base, *models])
    if not named or (isinstance(base, Mapping) and models):
        raise UserError("surgery.bench takes models, bench(base, hybrid), or one dictionary of them by name, with at least one")
    entries = {name: _entry(name, value) for name, value in named.items()}
    first, entry = next(iter(entries.items()))
    model = entry.model
    known = opened(model)
    words = _tokenizer(named, entries, tokenizer)
    options = options or Bench()
    if data is None:
        say_of_the_world(words, "bench")
    name = known.name if known else model.name_or_path or first
    origin = provenance(name, known.fingerprint if known else fingerprint(model), seed)
    return Report(
        provenance=origin,
        plan=next((published(each.plan) for each in entries.values() if each.plan), None),
        models=measure(entries, words, options, data=data, seed=seed, cells=cells),
        timings={},
        training={},
        settings=strip_paths(options.model_dump(mode="json")),
    )


def _named(models: list[Any]) -> dict[str, Any]:
    """What the report calls models that were given without names: base, and hybrid or the name of the folder."""
    named: dict[str, Any] = {"base": models[0]}
    for value in models[1:]:
        label = display_name(value.name).rpartition("/")[2] if isinstance(value, Checkpoint) else "hybrid"
        candidates = (label, *(f"{label}_{i}" for i in range(2, len(models) + 2)))
        named[next(name for name in candidates if name not in named)] = value
    return named


def _entry(name: str, value: Any) -> Entry:
    if isinstance(value, Entry):
        return value
    model: Any = model_of(value, "bench")
    surgery = getattr(model, "surgery", None)
    described = display_name(value.name) if isinstance(value, Checkpoint) else name
    return Entry(model, described, None if surgery is None else surgery.plan)


def _tokenizer(named: dict[str, Any], entries: dict[str, Entry], tokenizer: Any) -> PreTrainedTokenizerBase:
    """The tokenizer for all: the one that was given, or the first that a model brings. Raises UserError if another model brings
    another vocabulary, since the examples would not be the same."""
    own: dict[str, PreTrainedTokenizerBase] = {}
    for name, entry in entries.items():
        given = named[name]
        brought = given.tokenizer if isinstance(given, Checkpoint) else remembered_tokenizer(entry.model)
        if brought is not None:
            own[name] = brought
    words = tokenizer_of(
        next(iter(entries.values())).model, tokenizer if tokenizer is not None else next(iter(own.values()), None), "bench"
    )
    for name, other in own.items():
        if other is not words and other.get_vocab() != words.get_vocab():
            raise UserError(f"{name} has another tokenizer than the others; their examples would not be the same")
    return words


def measure(
    entries: Mapping[str, Entry | PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    options: Bench | None = None,
    *,
    data: Data | None = None,
    seed: int = 0,
    cells: Path | None = None,
) -> dict[str, ModelReport]:
    """Measure every model; the first is the base that the others are compared with.

    A model that its entry does not hold is opened for its turn, and timed by itself. cells: a folder that keeps each finished
    measurement, so that it is not repeated. A cell is found again by what it depends on: the questions, and the Conditions.
    Processes that accelerate started share the cells; the main one alone times.

    Raises UserError for a suite whose data or package is missing, and if two models were not asked the same.
    """
    options, data = options or Bench(), data or Data()
    check(options)
    named = {name: e if isinstance(e, Entry) else Entry(e, name) for name, e in entries.items()}
    todo = tasks(options, tokenizer, data, seed)
    if lacking := next((task.lacking for task in todo if task.lacking), None):
        raise UserError(lacking)
    models, words = ModelPool(named), tokenizer_digest(tokenizer)
    for model in models.held.values():
        keep_apart(model)
    with busy("reading the weights"):
        measured_under = {name: models.measured_under(name, tokenizer, words) for name in named}
    if len({each.dtype for each in measured_under.values()}) > 1:
        dtypes = ", ".join(f"{name} in {each.dtype}" for name, each in measured_under.items())
        say(f"the models are in several dtypes: {dtypes}")
    cells_of = {name: cells | pooled(cells) for name, cells in _measured(models, measured_under, todo, cells).items()}
    first = next(iter(named))
    contexts = readable(options, tokenizer)
    if contexts and not decodes(models[first]):
        say(f"note: {first} cannot go on from a cache in transformers, so that no token is timed")
        contexts = []
    timed = _timed(models, measured_under, timings(options, contexts), cells)
    further = _further(models, measured_under, options, tokenizer, cells)
    pairs: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}
    for name, by_task in cells_of.items():
        for task, measured in by_task.items():
            if name != first:
                check_same(cells_of[first][task], measured)
                pairs[name, task] = (values(cells_of[first][task]), values(measured))
    tests = evidence(pairs)
    return {
        name: _report(
            entry,
            measured_under[name],
            cells_of[name],
            {task: difference(base, model) for (n, task), (base, model) in pairs.items() if n == name},
            {task: test for (n, task), test in tests.items() if n == name},
            {
                "cost": tuple(cost for each in timed[name] for cost in each.costs),
                "speed": tuple(speed for each in timed[name] for speed in each.speeds),
                **further[name],
            },
            models.parameters.get(name),
            _guessing(models[first], data, cells_of[first]) if name == first else {},
            invented(data, tokenizer, ("held_out_text", "facts")) if name == first else (),
        )
        for name, entry in named.items()
    }


def _measured(
    models: ModelPool, measured_under: dict[str, Conditions], todo: list[Task], folder: Path | None
) -> dict[str, dict[str, list[Cell]]]:
    """By model and task, one cell a seed, or a part of a group. Each process measures its share."""
    # A task is asked of all models that are there at once before the next: its questions are encoded once.
    jobs = [(name, task) for names in models.together() for task in todo for name in names]
    say(f"measuring {len(models)} models on {len({task.name for task in todo})} tasks: {len(jobs)} cells")
    progress = Track(share(jobs), "bench")
    mine: list[Cell] = []
    for name, task in progress:
        progress.note = f"{name} {task.name}"

        def measure(name: str = name, task: Task = task) -> Cell:
            with within(f"{name}, {task.name}"):
                outcome = task.measure(models[name])
            return Cell(
                model=name, task=task.name, part=task.part, seed=task.seed, metric=task.metric, inputs=outcome.inputs,
                asked=outcome.digests, values=tuple(map(float, outcome.values)),
            )  # fmt: skip

        key = measured_under[name].model_dump() | {"settings of generation": models.writing(name), **task.key()}
        cell = kept(folder, key, Cell, measure)
        mine.append(cell.model_copy(update={"model": name, "seed": task.seed}))  # it may have been kept by another name
    gathered = {(cell.model, cell.task, cell.part, cell.seed): cell for cell in gather(mine)}
    cells_of: dict[str, dict[str, list[Cell]]] = {name: {} for name in models}
    for name, task in jobs:
        cells_of[name].setdefault(task.name, []).append(gathered[name, task.name, task.part, task.seed])
    return cells_of


def _timed(
    models: ModelPool, measured_under: dict[str, Conditions], timings: list[Timing], folder: Path | None
) -> dict[str, list[Timed]]:
    """What tokens cost in each model, measured by the first process while the others wait. Those that are held are timed
    together, so that a disturbance of the machine hits all of them."""
    common = here()
    timed: dict[str, list[Timed]] = {name: [] for name in models}
    if is_main():
        for names, timing in Track([(names, timing) for names in models.together() for timing in timings], "timing"):
            key = {"cell": timing.cell, **common, "models": [measured_under[name].model_dump() for name in names]}
            times = kept(folder, key, Timed, partial(_time, models, names, timing))
            for name, one_model in zip(names, times.each(), strict=True):
                timed[name].append(one_model)
    state().wait_for_everyone()
    return timed


def _further(
    models: ModelPool,
    measured_under: dict[str, Conditions],
    options: Bench,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | None,
) -> dict[str, dict[str, Any]]:
    """Model -> the fields of its report that suites measure in ways of their own."""
    further: dict[str, dict[str, Any]] = {name: {} for name in models}
    for fields in having("fields"):
        for name, of_model in fields(models, measured_under, options, tokenizer, folder).items():
            further[name] |= of_model
    state().wait_for_everyone()
    return further


def _time(models: ModelPool, names: list[str], timing: Timing) -> Timed:
    return timing.measure({name: models[name] for name in names})


def _result(task: str, measured: np.ndarray) -> Proportion | Estimate | Perplexity:
    if task in ("perplexity", "sliding"):
        return Perplexity(value=float(np.exp(measured.mean())), loss=mean(measured))
    return proportion(measured) if decisions(measured) else mean(measured)


def _report(
    entry: Entry, measured_under: Conditions, cells: dict[str, list[Cell]], change: dict[str, Estimate],
    tests: dict[str, Evidence], further: dict[str, Any], parameters: int | None, guessing: dict[str, float],
    of_the_world: tuple[str, ...],
) -> ModelReport:  # fmt: skip
    results = {task: _result(task, values(measured)) for task, measured in cells.items()}
    kv = {task.removeprefix("kv."): results.pop(task) for task in [*results] if task.startswith("kv.")}
    own = {name: results.pop(name) for name in ("knowledge", "letters", "perplexity") if name in results}
    seeds: dict[str, tuple[float, ...]] = {}
    for task, several in cells.items():
        if len(drawn := sorted({cell.seed for cell in several})) > 1:
            seeds[task] = tuple(float(values([c for c in several if c.seed == seed]).mean()) for seed in drawn)
    fields: dict[str, Any] = {
        "description": entry.description,
        "plan": entry.plan and published(entry.plan),
        "conditions": measured_under,
        "parameters": parameters,
    }
    return ModelReport.model_validate(
        {**fields, **further, "kv": kv, **own, "tasks": results, "change": change, "evidence": tests,
         "seeds": seeds, "guessing": guessing, "invented": of_the_world}
    )  # fmt: skip


def invented(data: Data, tokenizer: PreTrainedTokenizerBase, names: Iterable[str]) -> tuple[str, ...]:
    """Those of some settings of `data` that take text or facts of the built-in models' small world, for a model that is none of
    them."""

    def of_world(source: Any) -> bool:
        return source == "world" if isinstance(source, str) else any(each.source == "world" for each in source)

    world = tuple(f"data.{name}" for name in names if of_world(getattr(data, name)))
    return () if not world or is_of_the_world(tokenizer) else world


def _guessing(model: PreTrainedModel, data: Data, measured: Collection[str]) -> dict[str, float]:
    """What guessing gives on some tasks (ModelReport.guessing)."""
    embeddings: Any = model.get_input_embeddings()
    guessing: dict[str, float] = {}
    if "perplexity" in measured:
        guessing["perplexity"] = math.log(embeddings.weight.shape[0])
    if "knowledge" in measured:
        guessing["knowledge"] = float(np.mean([each.chance for each in Knowledge(data.facts).questions(sys.maxsize, 0)]))
    if "letters" in measured:
        guessing["letters"] = Letters(data.facts).questions(1, 0)[0].chance  # all have as many letters
    return guessing
