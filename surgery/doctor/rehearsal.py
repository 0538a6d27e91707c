"""What tuning would cost here, before it is begun: a few real steps at the recipe's batch, after which all is as it was.

Measured, on every device: the time of a step, and the most memory that it holds beyond the model. Computed from the sizes of
tensors: what of that are gradients and the optimizer's state; what remains are activations and all else that comes and goes.
"""

from dataclasses import asdict, dataclass, fields
from itertools import islice
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.records.recipe import Data, Tune
from surgery.runtime.processes import gather
from surgery.runtime.timing import peak_bytes
from surgery.tuning.batches import BUFFER, loaders, padding
from surgery.tuning.loop import Run, begun

STEPS = 3  # the first is not counted: memory is asked for and kernels are compiled in it


@dataclass(frozen=True)
class Cost:
    """Of one process. Memory in bytes; weights: of the model and of what the teacher has otherwise."""

    device: str
    seconds: float
    weights: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True)
class Rehearsal:
    """trained: (name, shape) of every tensor. steps: of distil. padding: its share in the batches of text, of the first ones;
    None without text."""

    trained: list[tuple[str, tuple[int, ...]]]
    steps: int
    padding: float | None
    costs: list[Cost]

    def numbers(self) -> int:
        return sum(_product(shape) for _, shape in self.trained)

    def tensor_rows(self) -> tuple[list[str], list[list[str]]]:
        rows = [[name, " x ".join(map(str, shape)), f"{_product(shape):,}"] for name, shape in self.trained]
        return ["trained tensor", "shape", "numbers"], rows

    def cost_rows(self) -> tuple[list[str], list[list[str]]]:
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
    """Take a few steps of `distil` and put everything back; nothing is written. Of several processes, each measures itself."""
    data, steps = data or Data(), options.steps
    short: dict[str, Any] = {"steps": STEPS, "report_to": ()}
    short |= dict.fromkeys(("align", "calibrate", "early_stopping", "repeat"))
    whole = options.model_copy(update={"curriculum": 0.0, **short})
    with begun(model, tokenizer, whole, data=data, seed=seed, teacher=teacher) as run:
        start = run.checkpoints.tensors()
        try:
            seconds = _seconds(run)
            run.options, run.state.step = whole.model_copy(update={"steps": 1}), 0
            most = peak_bytes(run.distil, run.accelerator.device)
        finally:
            run.checkpoints.put(start)
        trained = [(name, tuple(p.shape)) for name, p in run.trained.items()]
        parts = run.accelerator.num_processes if run.descent.sharded else 1
        weights = sum(p.nbytes for p in run.distillation.parameters()) // parts
        gradients = sum(p.nbytes for p in run.trained.values()) // parts
        rest = max(0, most - 3 * gradients)
        cost = Cost(str(run.accelerator.device), seconds, weights, gradients, 2 * gradients, rest)
    share = None
    if options.text_batch_size:
        share = padding(_texts(tokenizer, whole.model_copy(update={"steps": BUFFER}), data, seed))
    return Rehearsal(trained, steps, share, gather([cost]))


def _seconds(run: Run) -> float:
    """Of a step, all but the first."""
    times: list[float] = []

    def look(_: int) -> tuple[dict[str, float], bool]:
        times.append(perf_counter())
        return {}, False

    run.distil(look)
    return (times[-1] - times[0]) / (len(times) - 1)


def _texts(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int) -> list[tuple[Tensor, ...]]:
    return list(islice(loaders(tokenizer, options, data, seed, 0)[1], BUFFER))


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"
