"""Measures a step of tuning: of two grafted heads by this project, and of all weights by transformers' Trainer.

Both see the same batch: retrieval lessons, and text of the same length, without padding. Our step compares the student with its
teacher on the text, which takes one forward more than the Trainer's step. The grafts are in the first layer, as in the demo, so
no backward pass is saved below them. Weights are random: the amount of work does not depend on them. Memory is that of a step
in the middle of a run, so the optimizer's state, which is larger for the Trainer, does not count.
"""

import copy
import random
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice
from surgery.tuning.distil import Distillation
from surgery.tuning.sequences import IGNORE, collate, kv_pieces
from surgery.tuning.trainable import trainable
from surgery.world.tokenizer import build_tokenizer
from tools import bench_shapes as shapes
from tools.turns import Runs

LESSONS, TEXTS, PAIRS, QUERIES = 16, 6, 32, 8
RATE = 1e-4


@cache
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Ids and targets of lessons, and ids of text: (sequences, tokens) each, with the same number of tokens."""
    lessons = [kv_pieces(random.Random(f"doctor {i}"), PAIRS, QUERIES) for i in range(LESSONS)]
    ids, targets = collate(build_tokenizer(), lessons)
    return ids, targets, torch.randint(1, 1600, (TEXTS, ids.shape[1]), generator=torch.Generator().manual_seed(0))


def graft_against_trainer(device: torch.device) -> Callable[[], Runs]:
    """Both contenders take one step and return the loss."""

    def make() -> Runs:
        stock = shapes.BASES["tiny-mamba2"]().to(device)
        ids, targets, text = (part.to(device) for part in batch())
        trainer = _trainer_step(copy.deepcopy(stock), ids, targets, text)
        return {"graft": _graft_step(stock, ids, targets, text), "trainer": trainer}

    return make


def _graft_step(stock: PreTrainedModel, ids: Tensor, targets: Tensor, text: Tensor) -> Callable[[], Tensor]:
    hybrid = splice(stock, Plan.model_validate({"sites": ("L0.H3,5",), "blend": 0.1}))
    trained = list(trainable(hybrid, None).values())
    for p in hybrid.parameters():
        p.requires_grad_(any(p is q for q in trained))
    module = Distillation(hybrid, adopt(stock)).train()
    optimizer = torch.optim.AdamW(trained, lr=RATE)

    places = torch.arange(text.shape[1], device=text.device).expand_as(text)  # one document a row

    def step() -> Tensor:
        loss = module(ids, targets, (text, torch.ones_like(text, dtype=torch.bool), places))["loss"]
        return _descend(loss, trained, optimizer)

    return step


def _trainer_step(stock: PreTrainedModel, ids: Tensor, targets: Tensor, text: Tensor) -> Callable[[], Tensor]:
    from transformers import Trainer, TrainingArguments  # seconds, which a mere diagnosis need not take

    labels = torch.full_like(ids, IGNORE)
    labels[:, 1:] = targets[:, :-1]  # the stock model shifts them itself
    inputs: dict[str, Any] = {"input_ids": torch.cat([ids, text]), "labels": torch.cat([labels, text])}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, learning_rate=RATE, report_to="none", use_cpu=ids.device.type == "cpu")
        trainer = Trainer(stock.train(), arguments)
    trainer.current_gradient_accumulation_steps = 1  # what train() would set
    optimizer = trainer.create_optimizer()

    def step() -> Tensor:
        loss = trainer.training_step(stock, inputs)  # with its backward
        return _descend(loss, list(stock.parameters()), optimizer)

    return step


def _descend(loss: Tensor, trained: list[Any], optimizer: torch.optim.Optimizer) -> Tensor:
    if loss.requires_grad:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
