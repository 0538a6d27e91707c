"""The steps of a stage, in one process or in several.

accelerate divides every batch among the processes, and the sums of losses are divided by the counts of the whole batch, so the
number of processes changes nothing but rounding. Each process holds the model (DDP), or a part of it (FSDP2); the main process
alone writes and prints.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from surgery.errors import UserError
from surgery.progress import Track
from surgery.recipe import Tune
from surgery.tune.shards import apart, collect, divided
from surgery.tune.state import Checkpoints, State
from surgery.tune.trackers import begin_trackers, finish_trackers

OUT_OF_MEMORY = ("not enough memory", "can't allocate memory")  # of a CPU, which has no exception of its own for it

Look = Callable[[int], tuple[dict[str, float], bool]]


class Descent:
    """What one run has from accelerate: its device, its processes, its trackers; and how it takes steps."""

    def __init__(self, options: Tune, checkpoints: Checkpoints, state: State, description: str):
        self.options, self.checkpoints, self.state, self.description = options, checkpoints, state, description
        self.accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(sync_with_dataloader=False),
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            log_with=list(options.trackers) or None,
            project_dir=checkpoints.out,
        )
        self.sharded = self.accelerator.distributed_type == DistributedType.FSDP
        _check(options, self.accelerator)
        begin_trackers(self.accelerator, options, description)

    def prepared(self, module: nn.Module, learning_rate: float, *loaders: DataLoader) -> Any:
        """The module, its optimizer, and loaders, as accelerate wants them."""
        if self.sharded:
            module = apart(module)
        optimizer = torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad],
            lr=learning_rate,
            weight_decay=self.options.weight_decay,
            betas=(0.9, 0.95),
        )
        return self.accelerator.prepare(module, optimizer, *loaders)

    def descend(
        self,
        module: nn.Module,
        optimizer: Any,
        batches: Iterable[list[tuple]],
        steps: int,
        look: Look | None = None,
    ) -> None:
        """Take the steps of a stage that are not yet done. A batch: the arguments of the module, part by part. look: after a
        step, more figures for its record, and whether it was the last."""
        accelerator, state, own = self.accelerator, self.state, self.accelerator.unwrap_model(module)
        learning = {name.rpartition("student.")[2]: p for name, p in own.named_parameters() if p.requires_grad}
        schedule = get_cosine_schedule_with_warmup(optimizer, self.options.warmup, steps)
        start, stage, accelerator.step = state.step, state.stage, 0
        what = self.description if stage == "distil" else f"{self.description}, {stage}"
        progress = Track(batches, what, steps - start)
        module.train()
        for parts in progress:
            if state.step == start:  # not before the first batch, which moves the random state
                self.checkpoints.restore(optimizer, schedule)
            accelerator.gradient_accumulation_steps = len(parts)
            losses: dict[str, Tensor] = {}
            for part in parts:
                with accelerator.accumulate(module):
                    found = module(*part)
                    losses = {name: losses.get(name, 0) + value.detach() for name, value in found.items()}
                    accelerator.backward(found["loss"] * len(parts))
                    if accelerator.sync_gradients:
                        figures = {name: value.item() for name, value in accelerator.reduce(losses, "mean").items()}
                        if not math.isfinite(figures["loss"]):
                            raise UserError(
                                f"{what}: the loss is {figures['loss']} at step {state.step + 1}; lower tune.learning_rate"
                            )
                        if state.step == start:
                            _every_parameter_learns(learning)
                        accelerator.clip_grad_norm_(list(learning.values()), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            schedule.step()
            state.step += 1
            more, last = look(state.step) if look else ({}, False)
            state.log.append({"stage": stage, "step": state.step, **figures, **more})
            self.track(state.log[-1:])
            progress.note = ", ".join(f"{name} {value:.4g}" for name, value in (figures | more).items() if name != "loss")
            if last:
                break
            if state.step % self.options.save_every == 0 and state.step < steps:
                if self.sharded:
                    collect(learning, self.checkpoints.trained)
                self.checkpoints.save(state, optimizer, schedule)
        module.eval()
        if self.sharded:
            collect(learning, self.checkpoints.trained)

    def track(self, records: list[dict[str, Any]]) -> None:
        """Hand the last records of the log to the trackers."""
        if self.accelerator.trackers:
            first = len(self.state.log) - len(records) + 1
            for step, record in enumerate(records, first):
                figures = {name: value for name, value in record.items() if name not in ("stage", "step")}
                self.accelerator.log({f"{record['stage']}/{name}": value for name, value in figures.items()}, step=step)

    def finish(self) -> None:
        finish_trackers(self.accelerator)


def _check(options: Tune, accelerator: Accelerator) -> None:
    """Raise UserError for what these processes cannot do."""
    n = accelerator.num_processes
    for name in ("batch_size", "text_batch_size"):
        if (size := getattr(options, name)) % n:
            raise UserError(f"tune.{name}: {size} cannot be divided among {n} processes; take a multiple of {n}")
    if options.batch_size // n < options.accumulate:
        share = f"the {options.batch_size // n} sequences of each of {n} processes"
        raise UserError(f"tune.accumulate: {share} have no {options.accumulate} parts")
    if divided() and n > 1 and accelerator.distributed_type == DistributedType.MULTI_CPU:
        raise UserError("accelerate divides no models on CPUs: run without FSDP there")  # it would use DDP and say nothing
    if accelerator.distributed_type == DistributedType.FSDP:
        if not accelerator.is_fsdp2:
            raise UserError("tune needs version 2 of FSDP: accelerate launch --fsdp_version 2")
        for name in ("align", "calibrate", "keep"):
            if getattr(options, name) is not None:
                raise UserError(f"tune.{name} needs whole models and cannot run with FSDP; run without one of the two")


@contextmanager
def fitting(description: str) -> Iterator[None]:
    """One clear line for a batch that does not fit into memory."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
        raise UserError(
            f"{description}: a batch does not fit into memory; lower tune.batch_size or tune.text_batch_size, or set "
            f"tune.accumulate, tune.checkpointing=true or tune.precision=bf16"
        ) from error


def _every_parameter_learns(trained: dict[str, nn.Parameter]) -> None:
    """A parameter without a gradient after the first backward would silently stay as it is."""
    for name, p in trained.items():
        if p.grad is None:
            raise UserError(f"'{name}' was to be trained, but no gradient reaches it")
