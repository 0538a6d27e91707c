"""The steps of a stage, in one process or in several.

accelerate divides every batch among the processes, and the sums of losses are divided by the counts of the whole batch, so the
number of processes changes nothing but rounding. Each process holds the model (DDP), or a part of it (FSDP2, ZeRO); the main
process alone writes and prints.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import Tensor, nn
from transformers.integrations import unset_hf_deepspeed_config

from surgery.errors import UserError
from surgery.models.finite import broken_weight
from surgery.models.offloaded import hooks
from surgery.records.recipe import Tune
from surgery.runtime.progress import Track
from surgery.tuning.distil import Distillation
from surgery.tuning.optimizer import cosine_schedule, parameter_groups
from surgery.tuning.shards import apart, collect, divided
from surgery.tuning.state import Checkpoints, State
from surgery.tuning.trackers import begin_trackers, finish_trackers

OUT_OF_MEMORY = ("not enough memory", "can't allocate memory")  # of a CPU, which has no exception of its own for it
CLIP = 1.0  # the norm of the gradient, at most

Look = Callable[[int], tuple[dict[str, float], bool]]


class Driven(nn.Module):
    """A Distillation, every use of which is a forward of this: there, processes that each hold a part of it bring the parts
    together."""

    def __init__(self, distillation: Distillation):
        super().__init__()
        self.distillation, self.config = distillation, distillation.student.config  # DeepSpeed asks for the hidden size

    def forward(self, use: Callable[..., Any], *args: Any) -> Any:
        return use(self.distillation, *args)


@dataclass(frozen=True)
class Prepared:
    """A Driven as accelerate wraps it, its optimizer, and what is trained by its name in the model: parameters, or this
    process's parts of them."""

    module: nn.Module
    optimizer: Any
    learning: dict[str, nn.Parameter]


class Descent:
    """What one run has from accelerate: its device, its processes, its trackers; and how it takes steps."""

    def __init__(self, options: Tune, checkpoints: Checkpoints, state: State, description: str, seed: int):
        self.options, self.checkpoints, self.state, self.description = options, checkpoints, state, description
        self.seed = seed
        self.accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(sync_with_dataloader=False),
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            log_with=list(options.report_to) or None,
            project_dir=checkpoints.out,
        )
        kind = self.accelerator.distributed_type
        self.zero = self.accelerator.deepspeed_plugin if kind == DistributedType.DEEPSPEED else None
        unset_hf_deepspeed_config()  # or all models that are loaded from now on, by one process alone, would be divided, too
        self.sharded = kind == DistributedType.FSDP or (self.zero is not None and self.zero.zero_stage == 3)
        _check(options, self.accelerator)
        begin_trackers(self.accelerator, options, description)

    def prepared(self, distillation: Distillation, learning_rate: float, parts: int = 1) -> Prepared:
        """For one stage; what was prepared for another is let go. What learns is what has a gradient now. parts: as many as a
        batch will have. Nothing is dropped at random until the steps begin, whatever was done with the model before."""
        self.accelerator.free_memory()
        self.accelerator.gradient_accumulation_steps = parts
        if self.zero:
            self.zero.deepspeed_config |= {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": self.options.batch_size // self.accelerator.num_processes // parts,
                "gradient_accumulation_steps": parts,
                "gradient_clipping": CLIP,
            }
        module = Driven(apart(distillation) if self.sharded else distillation)
        # What FSDP is to divide a model by.
        vars(module)["_no_split_modules"] = sorted({type(block).__name__ for block in distillation.student.base_model.layers})
        optimizer = torch.optim.AdamW(
            parameter_groups(module.named_parameters(), self.options.weight_decay), lr=learning_rate, betas=(0.9, 0.95)
        )
        placed = None if not hooks(distillation.student) else [False, True]  # accelerate's hooks say where it belongs
        module, optimizer = self.accelerator.prepare(module, optimizer, device_placement=placed)
        module.eval()
        own = self.accelerator.unwrap_model(module)
        learning = {name.rpartition("student.")[2]: p for name, p in own.named_parameters() if p.requires_grad}
        return Prepared(module, optimizer, learning)

    def collect(self, prepared: Prepared) -> None:
        """See that the model holds what was learnt. All processes have to call it."""
        if self.sharded:
            collect(prepared.learning, self.checkpoints.trained)

    def descend(
        self, prepared: Prepared, use: Callable[..., dict[str, Tensor]], batches: Iterable[list[tuple]], steps: int,
        look: Look | None = None,
    ) -> None:  # fmt: skip
        """Take the steps of a stage that are not yet done. use: gives the losses of a Distillation and a part of a batch. A
        batch: the arguments of that, part by part. look: after a step, more figures for its record, and whether it was the
        last."""
        state, module, optimizer = self.state, prepared.module, prepared.optimizer
        schedule = cosine_schedule(optimizer, self.options.warmup_steps, steps)
        start, stage = state.step, state.stage
        what = self.description if stage == "distil" else f"{self.description}, {stage}"
        progress = Track(batches, what, steps - start)
        self.checkpoints.restore(optimizer, schedule)
        module.train()
        for parts in progress:
            self._seed()
            figures = self._step(prepared, use, parts, what, first=state.step == start)
            schedule.step()
            state.step += 1
            more, last = look(state.step) if look else ({}, False)
            state.log.append({"stage": stage, "step": state.step, **figures, **more})
            self.track(state.log[-1:])
            progress.note = ", ".join(f"{name} {value:.4g}" for name, value in (figures | more).items() if name != "loss")
            if last:
                break
            if state.step % self.options.save_steps == 0 and state.step < steps:
                self.collect(prepared)
                self.checkpoints.save(state, optimizer, schedule)
        module.eval()
        self.collect(prepared)

    def _seed(self) -> None:
        """What a step draws at random depends on nothing that was drawn before: a resumed run draws the same."""
        key = f"{self.state.stage} {self.seed} {self.state.step} {self.accelerator.process_index}"
        torch.manual_seed(random.Random(key).getrandbits(63))

    def _step(
        self, prepared: Prepared, use: Callable[..., dict[str, Tensor]], parts: list[tuple], what: str, *, first: bool
    ) -> dict[str, float]:
        """The losses of a batch, after its step. Raises UserError, and takes none, where they are not finite."""
        accelerator, optimizer = self.accelerator, prepared.optimizer
        reached: set[str] = set()
        learning = prepared.learning if first else {}
        hooks = [p.register_hook(partial(_note, reached, name)) for name, p in learning.items()]
        losses: dict[str, Tensor] = {}
        for part in parts:
            with accelerator.accumulate(prepared.module):
                found = prepared.module(use, *part)
                losses = {name: losses.get(name, 0) + value.detach() for name, value in found.items()}
                if accelerator.sync_gradients:
                    figures = {name: value.item() for name, value in accelerator.reduce(losses, "mean").items()}
                    self._check_finite(prepared, figures["loss"], "loss", what)
                accelerator.backward(found["loss"] * len(parts))
                if accelerator.sync_gradients:
                    _every_parameter_learns(learning, reached)
                    norm = accelerator.clip_grad_norm_(list(prepared.learning.values()), CLIP)
                    self._check_finite(prepared, float(norm), "size of the gradient", what)
                optimizer.step()
                optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        return figures

    def _check_finite(self, prepared: Prepared, value: float, name: str, what: str) -> None:
        if math.isfinite(value):
            return
        driven: Any = self.accelerator.unwrap_model(prepared.module)
        both = driven.distillation  # student and teacher
        stepped = any(record["stage"] != "calibrate" for record in self.state.log)
        # What learns may have been ruined by a step; all else is as it came.
        why = broken_weight(both, [f"student.{weight}" for weight in prepared.learning] if stepped else ())
        why = why.replace("'student.", "'")
        if not why and stepped:
            why = "lower tune.learning_rate"
        why = why or f"nothing was learnt yet, so the model overflows in {both.student.dtype}"
        raise UserError(f"{what}: the {name} is {value} at step {self.state.step + 1}; {why}")

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
    if options.batch_size // n < options.gradient_accumulation_steps:
        raise UserError(
            f"tune.gradient_accumulation_steps: each of {n} processes has {options.batch_size // n} sequences of a batch, "
            f"which cannot be divided into {options.gradient_accumulation_steps} parts"
        )
    if divided() and n > 1 and accelerator.distributed_type == DistributedType.MULTI_CPU:
        raise UserError("accelerate divides no models on CPUs: run without FSDP there")  # it would use DDP and say nothing
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("tune needs version 2 of FSDP: accelerate launch --fsdp_version 2")
    if accelerator.mixed_precision != "no":
        raise UserError(
            f"leave out accelerate's {accelerator.mixed_precision}; the recipe has tune.mixed_precision=bf16 for that"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        asked = accelerator.deepspeed_plugin.deepspeed_config
        for name in ("optimizer", "scheduler"):
            if name in asked:
                raise UserError(f"DeepSpeed's configuration has its own {name}; leave it out, the recipe says how to learn")


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
            f"tune.gradient_accumulation_steps, tune.gradient_checkpointing=true or tune.mixed_precision=bf16"
        ) from error


def _note(reached: set[str], name: str, _: Tensor) -> None:
    reached.add(name)


def _every_parameter_learns(learning: dict[str, nn.Parameter], reached: set[str]) -> None:
    """A parameter without a gradient after the first backward would silently stay as it is. reached: names of those that had
    one on the way; DeepSpeed has taken it from them by now, FSDP gives their parts one at the end only."""
    for name, p in learning.items():
        if p.grad is None and name not in reached:
            raise UserError(f"'{name}' was to be trained, but no gradient reaches it")
