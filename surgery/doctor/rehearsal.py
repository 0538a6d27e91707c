"""Rehearses tuning: takes a few real steps with the recipe's batches, measures their cost, and puts everything back.

Measured on every device: the time of a step, and the most memory that it holds beyond the model. Of that memory, the gradients
and the optimizer's state are computed from the sizes of tensors; the rest is activations and whatever else is temporary.
"""

import math
from dataclasses import asdict, dataclass, fields
from itertools import islice
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.records.recipe import Data, Tune
from surgery.runtime.processes import gather
from surgery.runtime.timing import peak_bytes
from surgery.tuning.batches import BUFFER, loaders
from surgery.tuning.loop import started_run
from surgery.tuning.packed_rows import padding_share
from surgery.tuning.stages import Run

STEPS = 3  # the first is not counted: it allocates memory and compiles kernels


@dataclass(frozen=True)
class Cost:
    """The cost of tuning in one process. seconds: of a step. Memory in bytes; weights: of the model, and of those parts of the
    teacher that the model does not share."""

    device: str
    seconds: float
    weights: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True)
class Rehearsal:
    """trained: (name, shape) of every trained tensor. steps: of distil. padding: the share of padding in the first batches of
    text; None without text. costs: one for every process."""

    trained: list[tuple[str, tuple[int, ...]]]
    steps: int
    padding: float | None
    costs: list[Cost]

    def numbers(self) -> int:
        """How many numbers are trained."""
        return sum(math.prod(shape) for _, shape in self.trained)

    def tensor_rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and body of a table of the trained tensors."""
        rows = [[name, " x ".join(map(str, shape)), f"{math.prod(shape):,}"] for name, shape in self.trained]
        return ["trained tensor", "shape", "numbers"], rows

    def cost_rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and body of a table of what tuning costs on each device."""
        names = [field.name for field in fields(Cost)[2:]]
        rows = []
        for cost in self.costs:
            bytes_of = [asdict(cost)[name] for name in names]
            sizes = [_megabytes(size) for size in (*bytes_of, sum(bytes_of))]
            rows.append([cost.device, f"{cost.seconds:.3g} s", _duration(cost.seconds * self.steps), *sizes])
        return ["device", "a step", f"{self.steps} steps", *names, "in all"], rows


def rehearse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: Tune,
    *,
    data: Data | None = None,
    seed: int = 0,
    teacher: PreTrainedModel | None = None,
) -> Rehearsal:
    """Take a few steps of `distil` and put everything back. Nothing is written. Each of several processes measures itself.
    Arguments as for tune. Raises UserError for whatever tune would refuse."""
    data, steps = data or Data(), options.most_steps
    short: dict[str, Any] = {"steps": STEPS, "report_to": ()}
    short |= dict.fromkeys(("align", "calibrate", "early_stopping", "repeat"))
    whole = options.model_copy(update={"curriculum": 0.0, **short})
    with started_run(model, tokenizer, whole, data=data, seed=seed, teacher=teacher) as run:
        start = run.checkpoints.tensors()
        try:
            seconds = _seconds(run)
            run.options, run.state.step = whole.model_copy(update={"steps": 1}), 0
            peak = peak_bytes(run.distil, run.accelerator.device)
        finally:
            run.checkpoints.put(start)
        trained = [(name, tuple(p.shape)) for name, p in run.trained.items()]
        parts = run.accelerator.num_processes if run.descent.sharded else 1
        weights = sum(p.nbytes for p in run.distillation.parameters()) // parts
        gradients = sum(p.nbytes for p in run.trained.values()) // parts
        cost = Cost(
            device=str(run.accelerator.device),
            seconds=seconds,
            weights=weights,
            gradients=gradients,
            optimizer=2 * gradients,  # Adam's two moments
            activations=max(0, peak - 3 * gradients),
        )
    share = None
    if options.text_batch_size:
        share = padding_share(_texts(tokenizer, whole.model_copy(update={"steps": BUFFER}), data, seed))
    return Rehearsal(trained, steps, share, gather([cost]))


def _seconds(run: Run) -> float:
    """The mean time of a step, without the first."""
    times: list[float] = []

    def note_time(_: int) -> tuple[dict[str, float], bool]:
        times.append(perf_counter())
        return {}, False

    run.distil(note_time)
    return (times[-1] - times[0]) / (len(times) - 1)


def _texts(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int) -> list[tuple[Tensor, ...]]:
    return list(islice(loaders(tokenizer, options, data, seed, 0)[1], BUFFER))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"
