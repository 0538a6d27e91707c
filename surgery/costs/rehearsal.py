"""Rehearses tuning: takes a few real steps with the recipe's batches, on few rows and on more, and puts everything back.

Measured on every device: the time of a step, and the most memory that it holds beyond the model. Of that memory, the gradients
and the optimizer's state are computed from the sizes of tensors; the rest is activations and whatever else is temporary.
"""

import gc
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import islice, pairwise
from statistics import mean
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.models.pace import Pace, Piece, Work, measured, paced
from surgery.records.recipe import Data, Tune
from surgery.runtime.processes import gather, state
from surgery.runtime.timing import Stopwatch, peak_bytes
from surgery.tuning.batches import BUFFER, loaders
from surgery.tuning.loop import started_run
from surgery.tuning.packed_rows import padding_share
from surgery.tuning.run import TuningRun
from surgery.tuning.skill_batches import skill_loader

STEPS = 3  # the first is not counted: it allocates memory and compiles kernels
SECONDS = 6.0  # on the wall: that a step may take which is tried, about
ROWS = 256  # of a batch, whose tokens are counted; a larger batch has as many more as it has more rows
SIZES = ("batch_size", "text_batch_size", "skill_batch_size")  # of the parts of a batch, in their order
MOMENTS = 3  # of the size of what is trained: its gradient, and Adam's two


@dataclass(frozen=True)
class StepCost:
    """The cost of tuning in one process. seconds: of work, of a step. Memory in bytes; weights: of the model,
    and of those parts of the teacher that the model does not share."""

    device: str
    seconds: float
    weights: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True)
class TuningProfile:
    """trained: (name, shape) of every trained tensor. pace: of a step, by its tokens, padding included.
    padding: the share of it in the first batches of text; None without text. costs: one for every process."""

    trained: list[tuple[str, tuple[int, ...]]]
    steps: int
    pace: Pace
    padding: float | None
    costs: list[StepCost]

    def numbers(self) -> int:
        """How many numbers are trained."""
        return sum(math.prod(shape) for _, shape in self.trained)

    def tensor_rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and body of a table of the trained tensors."""
        rows = [[name, " x ".join(map(str, shape)), f"{math.prod(shape):,}"] for name, shape in self.trained]
        return ["trained tensor", "shape", "numbers"], rows

    def cost_rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and body of a table of what tuning costs on each device."""
        names = [field.name for field in fields(StepCost)[2:]]
        rows = []
        for cost in self.costs:
            bytes_of = [asdict(cost)[name] for name in names]
            sizes = [f"{size / 1e6:,.1f} MB" for size in (*bytes_of, sum(bytes_of))]
            rows.append([cost.device, f"{cost.seconds:.3g} s", _duration(cost.seconds * self.steps), *sizes])
        return ["device", "a step", f"{self.steps} steps", *names, "in all"], rows


def rehearse(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Tune, *, data: Data | None = None, seed: int = 0,
    layers: Iterable[int] | None = None, teacher: PreTrainedModel | None = None,
) -> TuningProfile:  # fmt: skip
    """Take a few steps and put everything back. Nothing is written. Each of several processes measures itself.
    Arguments as for tune. Raises UserError for whatever tune would refuse."""
    gc.collect()  # what is let go of during a step would be taken for what the step does not hold
    data, layers = data or Data(), None if layers is None else list(layers)
    whole = options.model_copy(update={"steps": STEPS, "early_stopping": None, "report_to": ()})
    a_step, padding = step_work(tokenizer, options, data, seed)
    trained: list[tuple[str, tuple[int, ...]]] = []
    cost: dict[str, Any] = {}

    def measure(size: int) -> Piece:
        few = _fewer(whole, size)
        _, *tried = _batches(tokenizer, few, data, seed, STEPS)[0]
        with started_run(model, tokenizer, few, data=data, seed=seed, layers=layers, teacher=teacher) as run:
            start = run.checkpoints.tensors()
            try:
                times, slower = _times(run)
                run.options, run.state.step = few.model_copy(update={"steps": 1}), 0
                peak = peak_bytes(run.distil, run.accelerator.device)
            finally:
                run.checkpoints.put(start)
            trained[:] = [(name, tuple(p.shape)) for name, p in run.trained.items()]
            parts = run.accelerator.num_processes if run.loop.sharded else 1
            gradients = sum(p.nbytes for p in run.trained.values()) // parts
            cost.update(
                device=str(run.accelerator.device), gradients=gradients, optimizer=(MOMENTS - 1) * gradients,
                weights=sum(p.nbytes for p in run.distillation.parameters()) // parts,
            )  # fmt: skip
        return Piece(mean(tried), times, max(0, peak - MOMENTS * gradients), slower)

    rows = max(options.batch_size, options.text_batch_size)
    of_a_step = paced(measure, _least(options), rows, SECONDS)
    cost |= {"seconds": of_a_step.time(a_step), "activations": round(of_a_step.memory(a_step.largest))}
    return TuningProfile(trained, options.most_steps, of_a_step, padding, gather([StepCost(**cost)]))


def step_work(tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int) -> tuple[Work, float | None]:
    """(a step of the recipe, on average, with the tokens of the largest; the share of padding in its text, if any)."""
    tokens, padding = _batches(tokenizer, options, data, seed, BUFFER)
    return Work(1, mean(tokens), round(max(tokens))), padding


def _least(options: Tune) -> int:
    """Rows of the larger of lessons and text, of which each process gets one."""
    return min(state().num_processes, max(options.batch_size, options.text_batch_size))


def _fewer(options: Tune, rows: int) -> Tune:
    """The options with so many rows of the larger of lessons and text, and of the other and of skills in their share; each
    process gets as many as the others."""
    each, whole = _least(options), max(options.batch_size, options.text_batch_size)

    def share(size: int) -> int:
        return min(size, max(1, round(size * rows / whole / each)) * each)

    few = {size: share(getattr(options, size)) for size in SIZES}
    parts = min(options.gradient_accumulation_steps, few["batch_size"] // each)
    return options.model_copy(update={**few, "gradient_accumulation_steps": parts})


def _times(run: TuningRun) -> tuple[tuple[float, ...], float]:
    """(the seconds of work of the steps, without the first; how many times as long they took on the wall)."""
    times: list[tuple[float, float]] = []
    watch = Stopwatch(run.accelerator.device)

    def note_time(_: int) -> tuple[dict[str, float], bool]:
        times.append(watch.read())
        return {}, False

    run.distil(note_time)
    return measured((after[0] - before[0], after[1] - before[1]) for before, after in pairwise(times))


def _batches(
    tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int, steps: int
) -> tuple[list[float], float | None]:
    """(the tokens of each of a run of so many steps, the share of padding in their text)."""
    sizes = {size: min(getattr(options, size), ROWS) for size in SIZES}
    few = options.model_copy(update={"steps": steps, **sizes})
    more = [getattr(options, size) / max(1, rows) for size, rows in sizes.items()]
    parts = (*loaders(tokenizer, few, data, seed, 0), skill_loader(tokenizer, few, data, seed, 0))
    batches = list(islice(zip(*parts, strict=False), steps))
    text = [each for _, each, _ in batches if each is not None]
    counts = [
        sum(part[0].numel() * factor for part, factor in zip(batch, more, strict=True) if part is not None)
        for batch in batches
    ]  # fmt: skip
    return counts, padding_share(text) if text else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"
