"""The stages of tuning, one after the other, and what is watched after every step: early stopping, and tune.steps=auto."""

from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.models.finite import explained, within
from surgery.models.offloaded import hooks
from surgery.records.recipe import Data, Tune
from surgery.runtime.bf16 import advise_bf16
from surgery.runtime.progress import say
from surgery.tuning.calibrate import calibrate
from surgery.tuning.descent import AfterStep, Descent, Prepared, fitting
from surgery.tuning.distil import Distillation
from surgery.tuning.early_stopping import Guard
from surgery.tuning.graft_alignment import alignment_error, gather_states, without_gates
from surgery.tuning.lora import resting
from surgery.tuning.micro_batches import MicroBatches
from surgery.tuning.plateau import LossCurve, Plateau
from surgery.tuning.shared_parts import StateCache
from surgery.tuning.state import Checkpoints, State

DONE = "done"  # what follows the last stage
PROBE_SEED = 10_007  # added to the run's: calibration looks at other examples than those that the grafts learn from
HELD_OUT_SEED = 20_011  # and early stopping at others again
CURVE_SEED = 40_009  # and tune.steps=auto


class TuningRun:
    """One call of tune, or one process's part in it. Its methods are the stages. Their results are `state` and the trained
    parameters."""

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
        stages: list[str],
    ):
        self.model, self.tokenizer, self.trained = model, tokenizer, trained
        self.until_flat = options.steps == "auto"
        self.options, self.data, self.seed = options, data, seed
        self.checkpoints, self.state, self.description, self.stages = checkpoints, state, description, stages
        self.descent = Descent(options, checkpoints, state, description, seed)
        self.accelerator = self.descent.accelerator
        self.micro_batches = MicroBatches(tokenizer, options, data, self.accelerator)
        # A base in float16 computes in bfloat16, too. The range of bfloat16 holds what float16 cannot (the built-in Mamba-1's
        # products reach 3e5), and needs no loss scaling, whose state and skipped steps would have to be resumed and to agree
        # between processes. On a CPU a step in float16 also takes eight times as long.
        advise_bf16(self.accelerator.device, options.mixed_precision)
        bf16 = options.mixed_precision == "bf16" or model.dtype in (torch.bfloat16, torch.float16)
        checkpointing = options.gradient_checkpointing
        if checkpointing == "auto" and self.descent.sharded:  # processes that each hold a part have to do the same
            checkpointing = False
        self.distillation = Distillation(
            model,
            teacher,
            kl_weight=options.kl_weight,
            skill_weight=options.skill_weight,
            hit_weight=options.hit_weight,
            hint_weight=options.hints.weight if options.hints else 0.0,
            read_at=surgery.plan.places if (surgery := getattr(model, "surgery", None)) is not None else {},
            cache_bytes=options.cache_bytes,
            bf16=bf16,
            checkpointing=checkpointing,
        )
        # With a divided model each process moves its own part later; accelerate's hooks know where offloaded weights belong.
        if not self.descent.sharded and not hooks(model):
            self.distillation.to(self.accelerator.device)

    def finish_stages(self) -> None:
        """Do the stages that are not yet done, with a checkpoint after each."""
        for i, stage in enumerate(self.stages):
            if stage == self.state.stage:
                self.distillation.cache = StateCache(self.options.cache_bytes)  # no other stage has the same batches
                with fitting(self.description):
                    getattr(self, stage)()
                self.state.stage, self.state.step = [*self.stages, DONE][i + 1], 0
                self.checkpoints.save(self.state)
        self.restore_best()
        self.descent.finish()

    def align(self) -> None:
        """Train every graft to do what the base does in its place."""
        options = self.options.align
        assert options is not None
        with resting(self.model), without_gates(self.model):
            prepared = self.descent.prepared(self.distillation, options.learning_rate)
            batches = self.micro_batches.full_size(options.batches, self.seed)
            with torch.no_grad():
                states = prepared.module(gather_states, batches, self.options.cache_bytes, self.accelerator)
            steps = ([(states[step % len(states)],)] for step in range(self.state.step, options.steps))
            self.descent.descend(prepared, alignment_error, steps, options.steps)

    def calibrate(self) -> None:
        """Search for tau and the gates."""
        options = self.options.calibrate
        assert options is not None
        prepared = self.descent.prepared(self.distillation, self.options.learning_rate)
        losses = self.micro_batches.losses("calibrate", options.examples, self.seed + PROBE_SEED)
        with within(f"{self.description}, calibrate"), explained(self.model):
            records = calibrate(prepared.learning, options, partial(prepared.module, losses))
        self.descent.collect(prepared)
        self.state.log += records
        self.descent.track(records)

    def distil(self, after_step: AfterStep | None = None) -> None:
        """Train end to end. after_step: called after every step, instead of early stopping."""
        prepared = self.descent.prepared(
            self.distillation, self.options.learning_rate, self.options.gradient_accumulation_steps
        )
        steps = self.micro_batches.steps(self.seed, self.state.step)
        span = None
        if after_step is None:
            plateau = self._plateau(prepared) if self.until_flat else None
            after_step, span = self._watching(prepared, plateau), plateau[0].span if plateau else None
        self.descent.descend(prepared, Distillation.__call__, steps, self.options.most_steps, after_step, span)

    def restore_best(self) -> None:
        """After the last stage, put the best weights back, if early stopping has kept any."""
        if self.options.early_stopping is not None and self.state.stage == DONE:
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
        losses = self.micro_batches.each_loss("curve", self.options.auto.examples, self.seed + CURVE_SEED)

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
        guard = Guard(self.tokenizer, bounds, self.data, self.options, seed, divided=not self.descent.sharded)
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
                self.descent.collect(prepared)
                self.checkpoints.best = self.checkpoints.tensors()
            last = not within_bounds and state.best is not None
            if last:
                compared = ", ".join(f"{name} {figures[name]:.4g}, the base's {base[name]:.4g}" for name in base)
                say(f"{self.description}: stopped at step {step}, beyond the bounds of tune.early_stopping ({compared})")
            return {**figures, "held_out": held_out}, last

        if state.step == 0:
            after_step(0)
        return after_step
