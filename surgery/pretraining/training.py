"""Trains a model on the small world, from scratch: first retrieval by itself, then everything at once."""

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.pretraining.hints import hint_loss, looks
from surgery.pretraining.lessons import Progress, dictionaries, lesson
from surgery.pretraining.measuring import measured_probes
from surgery.pretraining.recipe import PretrainHints, PretrainRecipe
from surgery.probes.scoring import answer
from surgery.runtime.bf16 import autocast
from surgery.runtime.progress import Track, say
from surgery.tuning.optimizer import parameter_groups
from surgery.tuning.sequences import IGNORE, collate


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: PretrainRecipe) -> list[dict[str, float]]:
    """Train in place, first retrieval by itself, then everything, and return the log: a record for every 50th step."""
    optimizer = torch.optim.AdamW(
        parameter_groups(model.named_parameters(), recipe.weight_decay), lr=recipe.learning_rate, betas=(0.9, 0.95)
    )

    rng, curriculum = random.Random(recipe.seed), Progress(recipe.curriculum)
    log: list[dict[str, float]] = []

    def step(losses: dict[str, Tensor], progress: Track, number: int) -> None:
        total = torch.stack(list(losses.values())).sum()
        checked_loss(total.item(), number)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curriculum.record(losses["kv"].item())
        progress.note = f"pairs {curriculum.most}, " + ", ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
        if number % 50 == 0:
            rounded = {name: round(loss.item(), 4) for name, loss in losses.items()}
            log.append({"step": number, "pairs": curriculum.most, **rounded})

    hints = recipe.hints
    precision = autocast(model.device, recipe.mixed_precision)
    implementation = model.config._attn_implementation
    if hints is not None:
        model.set_attn_implementation("eager")  # the only one that returns attention weights
    progress, number = Track(range(hints.steps if hints else recipe.first_layer_steps), "pretrain retrieval"), -1
    for number in progress:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (number + 1) / recipe.warmup_steps)
        batch = collate(tokenizer, dictionaries(recipe, rng, curriculum.most))
        with precision:
            losses = _hinted(model, *batch, hints) if hints else {"kv": _loss(model, *batch, layers=recipe.first_layers)}
        step(losses, progress, number + 1)
        if curriculum.done:
            break
    if number >= 0:
        say(f"retrieval alone: {number + 1} steps, {curriculum.most} pairs")
    if hints is not None:
        model.set_attn_implementation(implementation)

    schedule = steady_schedule(optimizer, recipe.warmup_steps, recipe.steps, recipe.decay_from)
    progress = Track(range(recipe.steps), "pretrain")
    for number in progress:
        batches = lesson(tokenizer, recipe, rng, curriculum.most)
        with precision:
            losses = {name: _loss(model, *collate(tokenizer, batch)) for name, batch in batches.items() if batch}
        step(losses, progress, number + 1)
        schedule.step()
        if (number + 1) % 500 == 0:
            say(f"step {number + 1}: {_glance(model, tokenizer)}")
    return log


def checked_loss(loss: float, step: int) -> float:
    """The loss of a step. Raises UserError where it is not finite: that ends a training at once, and not when its model is
    measured."""
    if not math.isfinite(loss):
        raise UserError(f"pretrain: the loss is {loss} at step {step:,}; lower learning_rate, or raise warmup_steps")
    return loss


def _loss(model: Any, ids: Tensor, targets: Tensor, layers: int | None = None) -> Tensor:
    """The cross-entropy at the targets. layers: of the model that consists of its first so many layers."""
    decoder, is_target = model.base_model, targets != IGNORE
    all_layers = decoder.layers
    try:
        decoder.layers = all_layers[:layers]
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        decoder.layers = all_layers
    return F.cross_entropy(model.lm_head(hidden[is_target]), targets[is_target])


def _hinted(model: Any, ids: Tensor, targets: Tensor, hints: PretrainHints) -> dict[str, Tensor]:
    """The loss of dictionaries, and that of the hints."""
    (hidden, gathered, aggregated), is_target = looks(model, ids, hints.gather, hints.aggregate), targets != IGNORE
    return {
        "kv": F.cross_entropy(model.lm_head(hidden[is_target]), targets[is_target]),
        "hints": hints.weight * hint_loss(gathered, aggregated, ids, targets),
    }


def _glance(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """The accuracies of a model in training on a few questions, as one line."""
    model.eval()
    questions = {name: probe.questions(200, seed=1) for name, probe in measured_probes().items()}
    figures = {name: answer(model, tokenizer, batch).correct.mean() for name, batch in questions.items()}
    model.train()
    return ", ".join(f"{name} {figure:.2f}" for name, figure in figures.items())


def steady_schedule(optimizer: torch.optim.Optimizer, warmup: int, steps: int, decay_from: float) -> LambdaLR:
    """The learning rate as a share of its maximum: it rises over `warmup` steps, stays, and falls linearly to a twentieth from
    the share `decay_from` of the steps on. Until then it does not depend on their number."""

    def share(step: int) -> float:
        left = (steps - step) / (steps * (1 - decay_from))
        return min(1.0, (step + 1) / warmup) * min(1.0, max(0.05, left))

    return LambdaLR(optimizer, share)
