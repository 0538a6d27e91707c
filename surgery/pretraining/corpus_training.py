"""Trains a model on text of one's own, from scratch, for as long as it takes.

The learning rate rises, stays, and falls at the end. As long as it stays, nothing depends on the number of steps: it can be
changed, and `finish` lets the rate fall from where the training has come to. What was reached is kept every few steps, and when
a signal asks the process to end, after the step in which it comes; the same call goes on from there, and ends where an
uninterrupted one would have, bit for bit (with as many threads).
"""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.pretraining.chunked_entropy import mean_cross_entropy
from surgery.pretraining.corpus import Corpus, Windows, spread
from surgery.pretraining.corpus_measuring import RARE
from surgery.pretraining.recipe import OF_THE_WORLD, CorpusOptions, PretrainRecipe
from surgery.pretraining.training import checked_loss, steady_schedule
from surgery.probes.hits import NONE, seen_before
from surgery.probes.perplexity import token_losses
from surgery.runtime.bf16 import autocast
from surgery.runtime.deferring import deferred
from surgery.runtime.progress import Track, say
from surgery.tuning.optimizer import parameter_groups
from surgery.tuning.renaming import Renaming
from surgery.tuning.state import Checkpoints, State

CLIP = 1.0  # the largest norm of the gradient
LOG_STEPS = 50  # between two records of the log
PACE = 20  # steps over which the speed is taken
# What may change while a training goes on: the number of steps within bounds (_most_steps), and what it is no part of.
FREE = {"steps", "examples", "corpus", *OF_THE_WORLD}
FREE_OF_CORPUS = {"train", "held_out", "tokenizer", "vocabulary", "save_steps", "about", "dtype"}


@dataclass(frozen=True)
class HeldOut:
    """windows: (n, tokens + 1) of held-out text. groups: name -> which of the tokens behind each window's first, (n, tokens)
    bool; their mean losses are told as well."""

    windows: Tensor
    groups: dict[str, Tensor]

    @classmethod
    def of(cls, corpus: Corpus, options: CorpusOptions) -> Self:
        """With corpus.rename, the repeated rare pairs (hits) and the first occurrences of the same pairs (firsts)."""
        windows = spread(corpus.held_out, options.tokens + 1, options.eval_windows)
        if options.rename is None:
            return cls(windows, {})
        before = seen_before(windows.numpy(), corpus.pairs, RARE, within=False)
        repeated, firsts = before != NONE, np.zeros(before.shape, dtype=bool)
        rows, columns = np.nonzero(repeated)
        firsts[rows, before[rows, columns]] = True
        groups = {"hits": repeated, "firsts": firsts & ~repeated}
        return cls(windows, {name: torch.from_numpy(chosen[:, 1:]) for name, chosen in groups.items() if chosen.any()})

    @torch.no_grad()
    def losses(self, model: PreTrainedModel, rows: int) -> dict[str, float]:
        """Nats per token: of all, and of each group."""
        model.eval()
        losses = torch.cat([token_losses(model, part.to(model.device)).cpu() for part in self.windows.split(rows)])
        model.train()
        return {"held_out": losses.mean().item()} | {name: losses[chosen].mean().item() for name, chosen in self.groups.items()}


def train_on_corpus(model: PreTrainedModel, corpus: Corpus, recipe: PretrainRecipe, work: Path, *, finish: bool) -> State:
    """Train in place, from the newest checkpoint in `work` on, and return the state: the log has a record for every 50th step
    and for every measurement, `more` the seconds that it took and the number of steps. finish: let the learning rate fall from
    here. Raises UserError for checkpoints that were made with other settings, and for a loss that is not finite."""
    options = recipe.corpus
    assert options is not None
    renaming = Renaming(corpus.tokenizer, corpus.pairs, options.rename.rare) if options.rename else None
    windows = Windows(corpus.train, options.tokens, recipe.seed, renaming, options.repeats)
    held_out = HeldOut.of(corpus, options)
    trained = dict(model.named_parameters())
    anew = f"remove the folder {work} to begin anew"
    checkpoints = Checkpoints(work, trained, _settings(recipe, corpus), anew=anew, left="the same command goes on")
    state = checkpoints.begin(State(more={"seconds": 0.0}), resume=True)
    steps = _most_steps(recipe, state, work, finish=finish)
    state.more["steps"] = steps
    optimizer = torch.optim.AdamW(
        parameter_groups(model.named_parameters(), recipe.weight_decay),
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
        fused=model.device.type in ("cpu", "cuda"),
    )
    schedule = steady_schedule(optimizer, recipe.warmup_steps, steps, recipe.decay_from)
    checkpoints.restore(optimizer, schedule)
    if state.step:
        say(f"pretrain: goes on from step {state.step:,}")
    precision = autocast(model.device, recipe.mixed_precision)
    progress = Track(range(state.step, steps), "pretrain", steps, before=state.step)
    pace = _pace(options.batch_size * options.tokens)
    figures = dict[str, float]()
    model.train()
    with deferred() as stopped:
        begun = time.monotonic() - state.more["seconds"]
        next(pace)
        for _ in progress:
            _seed(recipe.seed, state.step)
            with precision:
                loss = _loss(model, windows.batch(state.step, options.batch_size))
            figures["loss"] = checked_loss(loss.item(), state.step + 1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state.step += 1
            speed = next(pace)
            measured = state.step % options.eval_steps == 0 or state.step == steps
            if measured:
                with precision:
                    losses = held_out.losses(model, options.batch_size)
                figures["held out"] = losses["held_out"]
            if measured or state.step % LOG_STEPS == 0 or state.step == 1:
                now = {name: round(loss, 4) for name, loss in losses.items()} if measured else {}
                state.log.append({"step": state.step, "loss": round(figures["loss"], 4), **now})
            progress.note = ", ".join(f"{name} {value:.3f}" for name, value in figures.items()) + f", {speed:,.0f} tokens/s"
            last = stopped()
            if state.step % options.save_steps == 0 or state.step == steps or last:
                state.more["seconds"] = time.monotonic() - begun
                checkpoints.save(state, optimizer, schedule)
            if last:
                break
    if state.step < steps:  # the signal's own handler has raised nothing
        raise UserError(f"pretrain: a signal ended it after step {state.step:,}; the same command goes on")
    return state


def _settings(recipe: PretrainRecipe, corpus: Corpus) -> dict[str, Any]:
    """What a training that goes on has to have in common with what it goes on from."""
    assert recipe.corpus is not None
    unset = {"start"} if recipe.start is None else set()  # versions up to 0.13 had none
    fixed = recipe.model_dump(mode="json", exclude=FREE | {"mixed_precision"} | unset)
    options = recipe.corpus.model_dump(mode="json", exclude=FREE_OF_CORPUS)
    # mixed_precision is where versions up to 0.11 had it, whose trainings go on.
    return {**fixed, "corpus": {**options, "mixed_precision": recipe.mixed_precision, "text": corpus.about["digest"]}}


def _most_steps(recipe: PretrainRecipe, state: State, work: Path, *, finish: bool) -> int:
    """The number of steps, all in all. Raises UserError where it would change the course of a learning rate that falls."""
    before = state.more.get("steps", recipe.steps)
    if state.more.get("finishing"):
        return before
    if state.step > recipe.decay_from * min(before, recipe.steps):
        if before != recipe.steps:
            raise UserError(
                f"at step {state.step:,} of {before:,} the learning rate falls already, or would with steps: {recipe.steps}; "
                f"set steps: {before}, or remove the folder {work} to begin anew"
            )
        return before
    if not finish:
        return recipe.steps
    if not recipe.decay_from:
        raise UserError("--finish lets the learning rate fall, and with decay_from: 0 it falls from the first step on")
    state.more["finishing"] = True
    return math.floor(state.step / recipe.decay_from) + 1


def _seed(seed: int, step: int) -> None:
    """Seed torch by the step alone, so that a resumed training draws the same random numbers."""
    torch.manual_seed(random.Random(f"pretrain {seed} {step}").getrandbits(63))


def _loss(model: Any, rows: Tensor) -> Tensor:
    """The mean cross-entropy, in nats, of rows (b, t + 1) behind their first tokens."""
    rows = rows.to(model.device)
    hidden = model.base_model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
    return mean_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, rows[:, 1:].flatten())


def _pace(tokens: int) -> Iterator[float]:
    """Asked before the first step and after every one, of so many tokens: tokens a second over the last steps."""
    times: list[float] = []
    while True:
        times = [*times[-PACE:], time.monotonic()]
        span = times[-1] - times[0]
        yield tokens * (len(times) - 1) / span if span else 0.0
