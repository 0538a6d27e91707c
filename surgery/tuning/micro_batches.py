"""What each of several processes gets of a batch, and of that, part by part, what goes through the model at once."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from surgery.records.recipe import Data, Tune
from surgery.tuning.batches import loaders
from surgery.tuning.distil import Batch, Distillation
from surgery.tuning.sequences import IGNORE


class MicroBatches:
    """Of one process, for one run."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Tune, data: Data, accelerator: Accelerator):
        self.tokenizer, self.options, self.data, self.accelerator = tokenizer, options, data, accelerator

    def steps(self, seed: int, start: int) -> Iterator[list[tuple]]:
        """Of every step of distil from `start` on: a batch as `parts` gives it. Where batches are repeated, it has a key."""
        options = self.options
        if options.repeat is None:
            yield from (self.parts(None, batch) for batch in self._batches(options, seed, start))
            return
        distinct = min(options.repeat, options.steps)
        some = list(self._batches(options.model_copy(update={"steps": distinct}), seed, 0))
        yield from (self.parts(step % distinct, some[step % distinct]) for step in range(start, options.steps))

    def some(self, count: int, seed: int) -> Iterator[Batch]:
        """So many batches, of full size from the first on."""
        return self._batches(self.options.model_copy(update={"steps": count, "curriculum": 0.0}), seed, 0)

    def parts(self, key: Any, batch: Batch) -> list[tuple]:
        """A batch as arguments of Distillation.forward, in `gradient_accumulation_steps` parts."""
        (ids, targets), text = batch
        n = self.options.gradient_accumulation_steps
        counted = [(targets != IGNORE).sum().item(), 1 if text is None else text[1].sum().item()]
        counts = tuple(self.accelerator.reduce(torch.tensor(counted, device=ids.device, dtype=torch.float), "mean").tolist())
        lessons = zip(ids.tensor_split(n), targets.tensor_split(n), strict=True)
        texts = [None] * n if text is None else list(zip(*(side.tensor_split(n) for side in text), strict=True))
        return [
            (*lesson, part if part and len(part[0]) else None, counts, None if key is None else (key, i))
            for i, (lesson, part) in enumerate(zip(lessons, texts, strict=True))
        ]

    def losses(self, name: str, examples: int, seed: int) -> Callable[[Distillation], dict[str, float]]:
        """What measures the mean losses of a model as it is, on batches of their own; the same in every process."""
        some = enumerate(self.some(-(-examples // self.options.batch_size), seed))
        batches = [self.parts((name, i), batch) for i, batch in some]

        @torch.no_grad()
        def losses(distillation: Distillation) -> dict[str, float]:
            found = [distillation(*part) for parts in batches for part in parts]
            means = {loss: torch.stack([figures[loss] for figures in found]).sum() / len(batches) for loss in found[0]}
            return {loss: mean.item() for loss, mean in self.accelerator.reduce(means, "mean").items()}

        return losses

    def _batches(self, options: Tune, seed: int, start: int) -> Iterator[Batch]:
        both: list[DataLoader] = [
            self.accelerator.prepare_data_loader(loader) for loader in loaders(self.tokenizer, options, self.data, seed, start)
        ]
        return zip(*both, strict=False)
