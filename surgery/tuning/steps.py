"""The steps of tuning, in one process or in several.

accelerate divides every batch among the processes, and the sums of losses are divided by the counts of the whole batch, so the
number of processes changes nothing but rounding. Each process holds the model (DDP) or a part of it (FSDP2, ZeRO). Only the
main process writes and prints.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from surgery.runtime.deferring import deferred
from surgery.runtime.processes import gather
from surgery.runtime.progress import Track, say
from surgery.tuning.distil import Distillation
from surgery.tuning.optimizer import cosine_schedule, falling_schedule, parameter_groups
from surgery.tuning.shards import apart, collect, divided
from surgery.tuning.state import Checkpoints, State
from surgery.tuning.trackers import begin_trackers

OUT_OF_MEMORY = ("not enough memory", "can't allocate memory")  # in RuntimeErrors: on a CPU there is no OutOfMemoryError
WEIGHT_DECAY = 0.01  # of matrices and convolution filters (optimizer.py)
CLIP = 1.0  # the largest norm of the gradient
SAVE_SECONDS = 300.0  # between two checkpoints, at most, where steps take long

AfterStep = Callable[[int], tuple[dict[str, float], bool]]


class ForwardOnly(nn.Module):
    """Wraps a Distillation so that every use of it is a forward of this module. Only in a forward do processes that each hold a
    part of the model bring the parts together."""

    def __init__(self, distillation: Distillation):
        super().__init__()
        self.distillation, self.config = distillation, distillation.student.config  # DeepSpeed asks for the hidden size

    def forward(self, use: Callable[..., Any], *args: Any) -> Any:
        return use(self.distillation, *args)


@dataclass(frozen=True)
class Prepared:
    """A ForwardOnly as accelerate has wrapped it, with its optimizer. learning: the trained parameters, or this process's parts
    of them, by their names in the model."""

    module: nn.Module
    optimizer: Any
    learning: dict[str, nn.Parameter]


class TrainingLoop:
    """Takes the steps of one run, with what accelerate gives it: device, processes and trackers."""

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
        unset_hf_deepspeed_config()  # otherwise every model that is loaded from now on would be divided, too
        self.sharded = kind == DistributedType.FSDP or (self.zero is not None and self.zero.zero_stage == 3)
        _check(options, self.accelerator)
        begin_trackers(self.accelerator, options, description)

    def prepared(self, distillation: Distillation) -> Prepared:
        """Prepare the modules. The trained parameters are those that have a gradient now. The modules are in eval mode, without
        dropout, until the steps begin."""
        parts = self.options.gradient_accumulation_steps
        self.accelerator.gradient_accumulation_steps = parts
        if self.zero:
            self.zero.deepspeed_config |= {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": self.options.batch_size // self.accelerator.num_processes // parts,
                "gradient_accumulation_steps": parts,
                "gradient_clipping": CLIP,
            }
        module = ForwardOnly(apart(distillation) if self.sharded else distillation)
        # The classes of modules by which FSDP divides a model.
        vars(module)["_no_split_modules"] = sorted({type(block).__name__ for block in distillation.student.base_model.layers})
        optimizer = torch.optim.AdamW(
            parameter_groups(module.named_parameters(), WEIGHT_DECAY), lr=self.options.learning_rate, betas=(0.9, 0.95)
        )
        placed = None if not hooks(distillation.student) else [False, True]  # accelerate's hooks say where it belongs
        module, optimizer = self.accelerator.prepare(module, optimizer, device_placement=placed)
        module.eval()
        own = self.accelerator.unwrap_model(module)
        learning = {name.rpartition("student.")[2]: p for name, p in own.named_parameters() if p.requires_grad}
        return Prepared(module, optimizer, learning)

    def collect(self, prepared: Prepared) -> None:
        """Write what was learnt into the model, if it is divided. All processes have to call it."""
        if self.sharded:
            collect(prepared.learning, self.checkpoints.trained)

    def run_steps(
        self, prepared: Prepared, batches: Iterable[list[tuple]], after_step: AfterStep | None,
        span: Callable[[], tuple[int, int] | None] | None,
    ) -> None:  # fmt: skip
        """Take the steps that are not yet done.

        batches: for every step a list of the parts, each of them the arguments of Distillation.forward. after_step: from the
        number of a step to more figures for its record, and whether it was the last. span: as falling_schedule takes it;
        without it the learning rate falls as tune.decay says.

        A checkpoint is written every `save_steps` steps, every SAVE_SECONDS, and where SIGINT or SIGTERM comes. The step is
        finished and saved then, before the signal goes to whatever listens. Raises UserError where a loss or a gradient is not
        finite, and where a signal has ended the steps and nobody else did anything about it."""
        state, module, optimizer, steps = self.state, prepared.module, prepared.optimizer, self.options.most_steps
        warmup, decay, start = self.options.warmup_steps, self.options.decay, state.step
        schedule = falling_schedule(optimizer, warmup, span) if span else cosine_schedule(optimizer, warmup, steps, decay)
        progress = Track(batches, self.description, steps, before=start)
        self.checkpoints.restore(optimizer, schedule)
        module.train()
        stopped, saved = False, time.monotonic()
        with deferred() as came:
            for parts in progress:
                self._seed()
                figures = self._step(prepared, parts, first=state.step == start)
                schedule.step()
                state.step += 1
                more, last = after_step(state.step) if after_step else ({}, False)
                state.log.append({"step": state.step, **figures, **more})
                self.track(state.log[-1])
                progress.note = ", ".join(f"{name} {value:.4g}" for name, value in (figures | more).items() if name != "loss")
                if last:
                    break
                stopped, late = self._agreed(came(), time.monotonic() - saved > SAVE_SECONDS)
                if stopped or ((late or state.step % self.options.save_steps == 0) and state.step < steps):
                    self.collect(prepared)
                    self.checkpoints.save(state, optimizer, schedule)
                    saved = time.monotonic()
                if stopped:
                    kept = "" if self.checkpoints.out is None else f"; what was learnt is kept in {self.checkpoints.out}"
                    say(f"{self.description}: stopped after step {state.step} of {steps}{kept}")
                    break
        if stopped:
            raise UserError(f"{self.description}: a signal ended it after step {state.step}")
        module.eval()
        self.collect(prepared)

    def _agreed(self, *own: bool) -> list[bool]:
        """Each of these, if it is so in any of the processes: all of them have to do the same."""
        return [any(column) for column in zip(*gather([own]), strict=True)] if self.accelerator.num_processes > 1 else [*own]

    def _seed(self) -> None:
        """Seed torch by the step alone, so that a resumed run draws the same random numbers."""
        key = f"distil {self.seed} {self.state.step} {self.accelerator.process_index}"
        torch.manual_seed(random.Random(key).getrandbits(63))

    def _step(self, prepared: Prepared, parts: list[tuple], *, first: bool) -> dict[str, float]:
        """Take a step and return the losses of its batch. Raises UserError, without taking it, where they are not finite."""
        accelerator, optimizer = self.accelerator, prepared.optimizer
        reached: set[str] = set()
        learning = prepared.learning if first else {}
        hooks = [p.register_hook(lambda _, name=name: reached.add(name)) for name, p in learning.items()]
        losses: dict[str, Tensor] = {}
        for part in parts:
            with accelerator.accumulate(prepared.module):
                part_losses = prepared.module(Distillation.__call__, *part)
                losses = {name: losses.get(name, 0) + value.detach() for name, value in part_losses.items()}
                if accelerator.sync_gradients:
                    reduced = accelerator.reduce(losses, "mean")
                accelerator.backward(part_losses["loss"] * len(parts))
                if accelerator.sync_gradients:
                    # Only now, and all at once: to look at a number is to wait for the device, which would have nothing to do.
                    figures = dict(zip(reduced, torch.stack(list(reduced.values())).tolist(), strict=True))
                    self._check_finite(prepared, figures["loss"], "loss")
                    _check_gradients(learning, reached)
                    norm = accelerator.clip_grad_norm_(list(prepared.learning.values()), CLIP)
                    self._check_finite(prepared, float(norm), "norm of the gradient")
                optimizer.step()
                optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        return figures

    def _check_finite(self, prepared: Prepared, value: float, name: str) -> None:
        if math.isfinite(value):
            return
        wrapper: Any = self.accelerator.unwrap_model(prepared.module)
        both = wrapper.distillation  # student and teacher
        stepped = bool(self.state.log)
        # A step may have made the trained weights not finite; all other weights are as they were loaded.
        why = broken_weight(both, [f"student.{weight}" for weight in prepared.learning] if stepped else ())
        why = why.replace("'student.", "'")
        if not why and stepped:
            why = "lower tune.learning_rate"
        why = why or f"nothing was learnt yet, so the model overflows in {both.student.dtype}"
        raise UserError(f"{self.description}: the {name} is {value} at step {self.state.step + 1}; {why}")

    def track(self, record: dict[str, Any]) -> None:
        """Send a record of the log to the trackers."""
        if self.accelerator.trackers:
            self.accelerator.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])


def _check(options: Tune, accelerator: Accelerator) -> None:
    """Raise UserError for settings that these processes cannot work with."""
    n = accelerator.num_processes
    for name in ("batch_size", "text_batch_size"):
        if (size := getattr(options, name)) % n:
            raise UserError(f"tune.{name}: {size} cannot be divided among {n} processes; choose a multiple of {n}")
    if options.batch_size // n < options.gradient_accumulation_steps:
        raise UserError(
            f"tune.gradient_accumulation_steps: each of {n} processes has {options.batch_size // n} sequences of a batch, "
            f"which cannot be divided into {options.gradient_accumulation_steps} parts"
        )
    if divided() and n > 1 and accelerator.distributed_type == DistributedType.MULTI_CPU:
        raise UserError("accelerate cannot divide models on CPUs; run without FSDP")  # it would use DDP and not say so
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("tuning needs version 2 of FSDP: accelerate launch --fsdp_version 2")
    if accelerator.mixed_precision != "no":
        raise UserError(
            f"leave out accelerate's {accelerator.mixed_precision}; the recipe has tune.mixed_precision=bf16 for that"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.deepspeed_plugin.deepspeed_config
        for name in ("optimizer", "scheduler"):
            if name in config:
                raise UserError(f"leave the {name} out of DeepSpeed's configuration; the recipe sets it")


@contextmanager
def fitting(description: str) -> Iterator[None]:
    """Raise UserError in one clear line for a batch that does not fit into memory."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
        raise UserError(
            f"{description}: a batch does not fit into memory; lower tune.batch_size or tune.text_batch_size, or set "
            f"tune.gradient_accumulation_steps, tune.gradient_checkpointing=true or tune.mixed_precision=bf16"
        ) from error


def _check_gradients(learning: dict[str, nn.Parameter], reached: set[str]) -> None:
    """Raise UserError for a parameter without a gradient: it would silently stay as it is. reached: the parameters whose
    gradient was seen in the backward pass. DeepSpeed has already taken it away by now, and with FSDP only the parts have
    one."""
    for name, p in learning.items():
        if p.grad is None and name not in reached:
            raise UserError(f"'{name}' is to be trained, but no gradient reaches it")
