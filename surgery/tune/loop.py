"""Brief fine-tuning with accelerate: cross-entropy on retrieval, KL to the frozen base on text.

The grafts alone are trained, so nothing below the first of them needs a backward pass, and the base's tensors cannot change.
The control of every claim runs through the same loop: the same data and steps with the base's own layers trained instead.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_cosine_schedule_with_warmup

from surgery.errors import UserError
from surgery.progress import Track
from surgery.recipe import Data, Tune
from surgery.splice import adopt, unsplice
from surgery.tune.data import IGNORE, Dictionaries, Windows, collate


def tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: Tune | None = None,
    *,
    data: Data | None = None,
    seed: int = 0,
    layers: Iterable[int] | None = None,
    teacher: PreTrainedModel | None = None,
    out: Path | None = None,
    resume: bool = False,
    description: str = "tune",
) -> list[dict[str, float]]:
    """Train `model` in place and return the log: one {"step", "loss", "retrieval", "kl"} per step, losses in nats.

    model: a hybrid, whose grafts are trained, or anything with `layers`, whose mixers are trained (the control; give it its
    own copy of the weights). teacher: what text is held to; by default the base of the hybrid, whose weights it shares. out: a
    folder for checkpoints every `options.save_every` steps; with `resume`, the newest one there is continued.
    """
    options, data = options or Tune(), data or Data()
    if layers is None and not model.config.grafts:
        raise UserError("there is nothing to tune: the model holds no grafts")
    if teacher is None:
        if layers is not None:
            raise UserError("tuning a model's own layers needs the unchanged base as teacher")
        teacher = adopt(unsplice(model))
    parts = [f".layers.{layer}.mixer." for layer in layers] if layers is not None else [".graft."]
    requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in parts))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)

    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(
        trained.values(), lr=options.learning_rate, weight_decay=options.weight_decay, betas=(0.9, 0.95)
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, options.warmup, options.steps)
    log: list[dict[str, float]] = []
    start = _resume(out, trained, optimizer, schedule, log) if resume and out is not None else 0
    prepared, optimizer, retrieval, text = accelerator.prepare(
        model, optimizer, *_loaders(tokenizer, options, data, seed, start)
    )
    teacher = teacher.to(accelerator.device).eval()
    prepared.train()
    progress = Track(zip(range(start, options.steps), retrieval, text, strict=False), description, options.steps - start)
    try:
        for step, (ids, targets), windows in progress:
            # Only the positions that some row of the batch is asked about need logits.
            keep = (targets != IGNORE).any(0).nonzero()[:, 0]
            logits = prepared(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
            ce = F.cross_entropy(logits.flatten(0, 1).float(), targets[:, keep].flatten(), ignore_index=IGNORE)
            kl = _divergence(prepared, teacher, windows) if windows is not None and options.kl_weight else ce.new_zeros(())
            loss = ce + options.kl_weight * kl
            if not torch.isfinite(loss):
                raise UserError(f"{description}: the loss is {loss.item()} at step {step + 1}; lower tune.learning_rate")
            accelerator.backward(loss)
            if step == start:
                _every_parameter_learns(trained)
            accelerator.clip_grad_norm_(list(trained.values()), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            log.append({"step": step + 1, "loss": loss.item(), "retrieval": ce.item(), "kl": kl.item()})
            progress.note = f"retrieval {ce.item():.3f}, KL {kl.item():.4f}"
            if (
                out is not None
                and accelerator.is_main_process
                and ((step + 1) % options.save_every == 0 or step + 1 == options.steps)
            ):
                _save(out, step + 1, trained, optimizer, schedule, log)
    finally:
        model.eval()
        for name, p in model.named_parameters():
            p.requires_grad_(requires_grad[name])
            p.grad = None
    return log


def _loaders(
    tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, seed: int, start: int
) -> tuple[DataLoader, DataLoader]:
    """Batches from step `start` on: dictionaries as (ids, targets), and windows of text, or None where there are none."""
    steps, size = options.steps, options.batch_size
    dictionaries = Dictionaries(steps, size, options.pairs, options.queries, seed)
    windows = Windows(data.train_text, tokenizer, steps * max(options.text_batch_size, 1), options.text_tokens, seed)
    rest = [
        Subset(whole, range(start * per_step, steps * per_step))
        for whole, per_step in ((dictionaries, size), (windows, max(options.text_batch_size, 1)))
    ]
    stack = torch.stack if options.text_batch_size else _nothing
    return (
        DataLoader(rest[0], batch_size=size, collate_fn=partial(collate, tokenizer)),
        DataLoader(rest[1], batch_size=max(options.text_batch_size, 1), collate_fn=stack),
    )


def _nothing(_: list[Tensor]) -> None:
    return None


def _divergence(model: nn.Module, teacher: PreTrainedModel, windows: Tensor) -> Tensor:
    """Mean KL(teacher || model) per token, in nats."""
    with torch.no_grad():
        wanted = teacher(input_ids=windows, use_cache=False).logits.float().log_softmax(-1)
    given = model(input_ids=windows, use_cache=False).logits.float().log_softmax(-1)
    return F.kl_div(given.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")


def _every_parameter_learns(trained: dict[str, nn.Parameter]) -> None:
    """A parameter without a gradient after the first backward would silently stay as it is."""
    for name, p in trained.items():
        if p.grad is None:
            raise UserError(f"'{name}' was to be trained, but no gradient reaches it")


def _save(out: Path, step: int, trained: dict, optimizer, schedule, log: list[dict[str, float]]) -> None:
    """Write checkpoint-<step> under a temporary name, rename it, then remove the older ones."""
    out.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out, prefix=".checkpoint-"))
    save_file({name: p.detach().cpu().contiguous() for name, p in trained.items()}, temporary / "trained.safetensors")
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, temporary / "optimizer.pt")
    (temporary / "log.json").write_text(json.dumps(log))
    target = out / f"checkpoint-{step}"
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    for older in _checkpoints(out)[:-1]:
        shutil.rmtree(older)


def _checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def _resume(out: Path, trained: dict, optimizer, schedule, log: list[dict[str, float]]) -> int:
    """Load the newest checkpoint; the number of steps that it has seen, 0 if there is none."""
    if not (found := _checkpoints(out)):
        return 0
    tensors = load_file(found[-1] / "trained.safetensors")
    if tensors.keys() != trained.keys():
        raise UserError(f"{found[-1]} was made by another plan; run without --resume or choose another --out")
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(tensors[name])
    state = torch.load(found[-1] / "optimizer.pt", weights_only=True, map_location="cpu")
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    log += json.loads((found[-1] / "log.json").read_text())
    return int(found[-1].name.split("-")[1])
