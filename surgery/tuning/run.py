"""One run of tuning: what is trained against what, the steps, and what is watched after each: early stopping, and
tune.steps=auto."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.models.offloaded import hooks
from surgery.records.recipe import Data, Tune
from surgery.runtime.bf16 import advise_bf16
from surgery.runtime.progress import say
from surgery.tuning import plateau as flat
from surgery.tuning.distil import Distillation
from surgery.tuning.early_stopping import Guard
from surgery.tuning.micro_batches import MicroBatches
from surgery.tuning.plateau import LossCurve, Plateau
from surgery.tuning.state import Checkpoints, State
from surgery.tuning.steps import AfterStep, Prepared, TrainingLoop, fitting
from surgery.tuning.trackers import finish_trackers

# Added to the run's: what is looked at are other examples than those that the grafts learn from.
HELD_OUT_SEED = 20_011  # by early stopping
CURVE_SEED = 40_009  # by tune.steps=auto


class TuningRun:
    """One call of tune, or one process's part in it. Its results are `state` and the trained parameters."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        teacher: PreTrainedModel,
        trained: dict[str, nn.Parameter],
        options: Tune,
        data: Data,
        seed: int,
        checkpoints: Checkpoints,
        state: State,
        description: str,
    ):
        self.tokenizer, self.trained = tokenizer, trained
        self.options, self.data, self.seed = options, data, seed
        self.checkpoints, self.state, self.description = checkpoints, state, description
        self.loop = TrainingLoop(options, checkpoints, state, description, seed)
        self.accelerator = self.loop.accelerator
        self.micro_batches = MicroBatches(tokenizer, options, data, self.accelerator)
        # A base in float16 computes in bfloat16, too. The range of bfloat16 holds what float16 cannot (the built-in Mamba-1's
        # products reach 3e5), and needs no loss scaling, whose state and skipped steps would have to be resumed and to agree
        # between processes. On a CPU a step in float16 also takes eight times as long.
        advise_bf16(self.accelerator.device, options.mixed_precision)
        bf16 = options.mixed_precision == "bf16" or model.dtype in (torch.bfloat16, torch.float16)
        checkpointing = options.gradient_checkpointing
        if checkpointing == "auto" and self.loop.sharded:  # processes that each hold a part have to do the same
            checkpointing = False
        self.distillation = Distillation(
            model,
            teacher,
            kl_weight=options.kl_weight,
            skill_weight=options.skill_weight,
            hit_weight=options.hit_weight,
            hint_weight=options.hints.weight if options.hints else 0.0,
            read_at=surgery.plan.places if (surgery := getattr(model, "surgery", None)) is not None else {},
            bf16=bf16,
            checkpointing=checkpointing,
        )
        # With a divided model each process moves its own part later; accelerate's hooks know where offloaded weights belong.
        if not self.loop.sharded and not hooks(model):
            self.distillation.to(self.accelerator.device)

    def finish(self) -> None:
        """Take the steps that are not yet done, and write a last checkpoint."""
        if not self.state.done:
            with fitting(self.description):
                self.distil()
            self.state.done = True
            self.checkpoints.save(self.state)
        self.restore_best()
        finish_trackers(self.accelerator)

    def distil(self, after_step: AfterStep | None = None) -> None:
        """Train end to end. after_step: called after every step, instead of early stopping."""
        prepared = self.loop.prepared(self.distillation)
        steps = self.micro_batches.steps(self.seed, self.state.step)
        span = None
        if after_step is None:
            plateau = self._plateau(prepared) if self.options.steps == "auto" else None
            after_step, span = self._watching(prepared, plateau), plateau[0].span if plateau else None
        self.loop.run_steps(prepared, steps, after_step, span)

    def restore_best(self) -> None:
        """Put the best weights back, if early stopping has kept any."""
        if self.options.early_stopping is not None:
            if self.state.best is None:
                say(
                    f"{self.description}: knowledge and perplexity were never within the bounds of tune.early_stopping; "
                    "the weights are those of the last step"
                )
            else:
                self.checkpoints.put(self.checkpoints.best)

    def _watching(self, prepared: Prepared, plateau: tuple[Plateau, AfterStep] | None) -> AfterStep | None:
        """What is called after every step: for tune.steps=auto, for early stopping, or for both."""
        if plateau is None:
            return self._early_stopping(prepared)
        guarded: Any = self._early_stopping(prepared)
        until_flat = plateau[1]

        def after_step(step: int) -> tuple[dict[str, float], bool]:
            figures, last = until_flat(step)
            if guarded is None:
                return figures, last
            more, beyond = guarded(step, last)
            return more | figures, last or beyond

        return after_step

    def _plateau(self, prepared: Prepared) -> tuple[Plateau, AfterStep]:
        """For tune.steps=auto: what decides when the curve is flat, and what is called after every step. The state holds
        what is known, so that a run that is resumed decides as it would have."""
        curve = LossCurve(**self.state.curve or {})
        plateau = Plateau(self.options, curve)
        losses = self.micro_batches.each_loss("curve", flat.EXAMPLES, self.seed + CURVE_SEED)

        def look(step: int) -> np.ndarray:
            prepared.module.eval()
            measured = prepared.module(losses)
            prepared.module.train()
            plateau.look(step, measured)
            self.state.curve = asdict(curve)
            return measured

        def after_step(step: int) -> tuple[dict[str, float], bool]:
            figures: dict[str, float] = {}
            if plateau.is_due(step):
                figures["curve"] = float(look(step).mean())
                if curve.flat is not None:
                    figures["flat"] = step
            span = plateau.span()
            if "flat" in figures and span is not None:
                short = plateau.is_cut_short()
                limit = f", but tune.max_steps={self.options.max_steps}" if short else ""
                say(
                    f"{self.description}: the held-out loss {'still falls' if short else 'is flat'} after {step} steps{limit}; "
                    f"the learning rate falls for {span[1] - step} more"
                )
            return figures, span is not None and step >= span[1]

        if self.state.step == 0:
            look(0)
        return plateau, after_step

    def _early_stopping(self, prepared: Prepared) -> AfterStep | None:
        """What is called after every step: it ends the steps when the model leaves the bounds, and keeps its best weights."""
        bounds, state, module = self.options.early_stopping, self.state, prepared.module
        if bounds is None:
            return None
        seed = self.seed + HELD_OUT_SEED
        guard = Guard(self.tokenizer, bounds, self.data, self.options, seed, divided=not self.loop.sharded)
        losses = self.micro_batches.losses("keep", bounds.examples, seed)
        base = module(guard.measure, True)

        def after_step(step: int, is_last: bool = False) -> tuple[dict[str, float], bool]:
            if step % bounds.eval_steps and step != self.options.most_steps and not is_last:
                return {}, False
            module.eval()
            figures, measured = module(guard.measure), module(losses)
            held_out = measured["retrieval"]
            if self.options.hit_weight:
                held_out += self.options.hit_weight * measured["hits"]
            module.train()
            within_bounds = guard.allows(figures, base)
            if within_bounds and (state.best is None or held_out < state.best["retrieval"]):
                state.best = {"step": step, "retrieval": held_out, **figures}
                self.loop.collect(prepared)
                self.checkpoints.best = self.checkpoints.tensors()
            last = not within_bounds and state.best is not None
            if last:
                compared = ", ".join(f"{name} {figures[name]:.4g}, the base's {base[name]:.4g}" for name in base)
                say(f"{self.description}: stopped at step {step}, beyond the bounds of tune.early_stopping ({compared})")
            return {**figures, "held_out": held_out}, last

        if state.step == 0:
            after_step(0)
        return after_step
