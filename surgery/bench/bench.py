"""Measure models side by side: the same examples for all, paired differences to the first."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.bench.report import ModelReport, Perplexity
from surgery.bench.speed import decode_cost
from surgery.plan import Plan
from surgery.probes import perplexity
from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.kv import KVRetrieval
from surgery.probes.question import Probe
from surgery.probes.scoring import answer
from surgery.progress import Track
from surgery.recipe import Bench, Data
from surgery.records import write_text
from surgery.splice import adopt
from surgery.statistics import mean, proportion


@dataclass
class Entry:
    """A model to measure, and how to call it in the report."""

    model: PreTrainedModel
    description: str
    plan: Plan | None = None


def bench(
    entries: Mapping[str, Entry | PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    options: Bench | None = None,
    *,
    data: Data | None = None,
    seed: int = 0,
    cells: Path | None = None,
) -> dict[str, ModelReport]:
    """Measure every model; the first is the base that the others are compared with.

    cells: a folder that keeps each finished measurement, so that an interrupted run does not repeat it. It belongs to one
    recipe: a cell is found again by the model's weights and by everything that it depends on.
    """
    options, data = options or Bench(), data or Data()
    named = {name: e if isinstance(e, Entry) else Entry(e, name) for name, e in entries.items()}
    probes: dict[str, Probe] = {f"kv.{pairs}": KVRetrieval(pairs) for pairs in options.pairs}
    probes |= {"knowledge": Knowledge(data.facts), "letters": Letters(data.facts)}
    questions = {name: probe.questions(options.examples, _bench_seed(seed)) for name, probe in probes.items()}
    text = perplexity.Perplexity(data.held_out_text, options.windows, options.window)
    windows = text.token_windows(tokenizer, _bench_seed(seed))

    tasks = [(name, task) for name in named for task in (*questions, "perplexity")]
    raw: dict[tuple[str, str], np.ndarray] = {}
    progress = Track(tasks, "bench")
    weights = {name: _digest(entry.model) for name, entry in named.items()}
    adopted = {name: adopt(entry.model).eval() for name, entry in named.items()}
    for name, task in progress:
        progress.note = f"{name} {task}"

        def measure(name: str = name, task: str = task) -> np.ndarray:
            if task == "perplexity":
                return text.losses(adopted[name], windows)
            return answer(adopted[name], tokenizer, questions[task], options.batch_size).correct

        settings = f"{weights[name]} {task} {options.examples} {options.windows} {options.window} {data} {seed}"
        raw[name, task] = _cell(cells, settings, measure)

    first = next(iter(named))
    longest = tokenizer.model_max_length
    contexts = tuple(c for c in options.contexts if c <= longest)
    costs = decode_cost({name: adopted[name] for name in named}, contexts)
    return {
        name: ModelReport(
            description=entry.description,
            plan=entry.plan,
            kv={task.removeprefix("kv."): proportion(raw[name, task]) for task in questions if task.startswith("kv.")},
            knowledge=proportion(raw[name, "knowledge"]),
            letters=proportion(raw[name, "letters"]),
            perplexity=Perplexity(value=float(np.exp(raw[name, "perplexity"].mean())), loss=mean(raw[name, "perplexity"])),
            cost=costs[name],
            change={
                task: mean(raw[name, task].astype(float) - raw[first, task].astype(float))
                for task in (*questions, "perplexity")
                if name != first
            },
        )
        for name, entry in named.items()
    }


def _bench_seed(seed: int) -> int:
    """Other examples than those that locate ranked heads with."""
    return seed + 10_000


def _digest(model: PreTrainedModel) -> str:
    """What distinguishes one model of a run from another: its parameters, grafts included, and where they sit."""
    total = hashlib.sha256(str(getattr(model.config, "grafts", None)).encode())
    for name, parameter in sorted(model.named_parameters()):
        total.update(name.encode())
        total.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _cell(folder: Path | None, settings: str, measure) -> np.ndarray:
    """The measurement, from `folder` if it was finished before."""
    if folder is None:
        return measure()
    path = folder / f"{hashlib.sha256(settings.encode()).hexdigest()[:32]}.txt"
    if path.exists():
        return np.array([float(value) for value in path.read_text().split()])
    values = np.asarray(measure(), dtype=float)
    write_text(path, "\n".join(repr(float(value)) for value in values) + "\n")
    return values
