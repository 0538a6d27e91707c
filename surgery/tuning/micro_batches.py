"""Divides batches: among the processes, and each process's share into the micro-batches that go through the model at once."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from surgery.probes.hits import PairCounts
from surgery.records.recipe import Data, Tune
from surgery.tuning.batches import loaders
from surgery.tuning.distil import Batch, Distillation, counted
from surgery.tuning.rare_pairs import training_pairs
from surgery.tuning.skill_batches import skill_loader


class MicroBatches:
    """The micro-batches of one process in one run."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, accelerator: Accelerator):
        self.tokenizer, self.options, self.data, self.accelerator = tokenizer, options, data, accelerator

    def steps(self, seed: int, start: int) -> Iterator[list[tuple]]:
        """The batches from step `start` on, each divided by `split`."""
        return (self.split(None, batch) for batch in self._batches(self.options, seed, start))

    def split(self, key: Any, batch: Batch) -> list[tuple]:
        """A batch in `gradient_accumulation_steps` parts, each the arguments of Distillation.forward."""
        lesson, text, skills = batch
        ids, targets = lesson[:2]
        n = self.options.gradient_accumulation_steps
        exact = torch.float32 if ids.device.type == "mps" else torch.float64  # which MPS has not
        own_counts = torch.tensor(counted(targets, text, skills), device=ids.device, dtype=exact)
        counts = tuple(self.accelerator.reduce(own_counts, "mean").tolist())
        lessons = zip(*(side.tensor_split(n) for side in lesson), strict=True)
        texts, questions = (_parts(side, n) for side in (text, skills))
        return [
            (ids, targets, text, counts, None if key is None else (key, i), evidence[0] if evidence else None, asked)
            for i, ((ids, targets, *evidence), text, asked) in enumerate(zip(lessons, texts, questions, strict=True))
        ]

    def losses(self, name: str, examples: int, seed: int) -> Callable[[Distillation], dict[str, float]]:
        """A function that measures the mean losses of a model, always on the same batches. All processes get the same losses.
        name: distinguishes these batches from others in the cache."""
        batches = self._fixed(name, examples, seed)

        @torch.no_grad()
        def losses(distillation: Distillation) -> dict[str, float]:
            part_losses = [distillation(*part) for parts in batches for part in parts]
            sums = {loss: torch.stack([losses[loss] for losses in part_losses]).sum() for loss in part_losses[0]}
            means = {loss: total / len(batches) for loss, total in sums.items()}
            return {loss: mean.item() for loss, mean in self.accelerator.reduce(means, "mean").items()}

        return losses

    def each_loss(self, name: str, examples: int, seed: int) -> Callable[[Distillation], np.ndarray]:
        """As `losses`, of the weighted sum that is minimised, and batch by batch: (batches,)."""
        batches = self._fixed(name, examples, seed)

        @torch.no_grad()
        def losses(distillation: Distillation) -> np.ndarray:
            values = [torch.stack([distillation(*part)["loss"] for part in parts]).sum() for parts in batches]
            return self.accelerator.reduce(torch.stack(values), "mean").double().cpu().numpy()

        return losses

    @cached_property
    def _pairs(self) -> PairCounts | None:
        return training_pairs(self.tokenizer, self.data) if self.options.hit_weight else None

    def _fixed(self, name: str, examples: int, seed: int) -> list[list[tuple]]:
        few = self.options.model_copy(update={"steps": -(-examples // self.options.batch_size)})
        return [self.split((name, i), batch) for i, batch in enumerate(self._batches(few, seed, 0))]

    def _batches(self, options: Tune, seed: int, start: int) -> Iterator[Batch]:
        all_three: list[DataLoader] = [
            *loaders(self.tokenizer, options, self.data, seed, start, self._pairs),
            skill_loader(self.tokenizer, options, self.data, seed, start),
        ]
        return zip(*map(self.accelerator.prepare_data_loader, all_three), strict=False)


def _parts(batch: tuple[Tensor, ...] | None, n: int) -> list[tuple[Tensor, ...] | None]:
    """A batch in n parts, None for one without rows."""
    if batch is None:
        return [None] * n
    return [part if len(part[0]) else None for part in zip(*(side.tensor_split(n) for side in batch), strict=True)]
