"""A batch of questions that is run again and again, each time from the layer on in which something is changed.

The batch goes through the model once, and what every block returns is kept. To see what a change in layer l does, the model's
own forward runs with the blocks before l skipped: they return what they returned before. So masks, positions, soft caps and
whatever else a family does stay the model's affair, and a change in layer l costs the layers from l on.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.models.anatomy import find_cache
from surgery.probes.encoded import Encoded
from surgery.probes.scoring import logits_at_points


class Replay:
    """One batch of a model. loss (questions,) and correct (questions,): of the model as it was when this was made."""

    @torch.no_grad()
    def __init__(self, model: Any, blocks: tuple[nn.Module, ...], encoded: Encoded):
        self.model, self.blocks, self.encoded = model, blocks, encoded
        self.outputs: list[Any] = []
        hooks = [block.register_forward_hook(lambda _, __, output: self.outputs.append(output)) for block in blocks[:-1]]
        try:
            logits = logits_at_points(model, encoded)
        finally:
            for hook in hooks:
                hook.remove()
        self.loss, self.correct = encoded.loss(logits).double().cpu(), encoded.correct(logits).cpu()

    @torch.no_grad()
    def run(self, layer: int) -> tuple[Tensor, Tensor]:
        """loss and correct (questions,) of the model as it is now, which is what it was in all layers before `layer`."""
        with skipped(self.blocks[:layer], self.outputs[:layer]):
            logits = logits_at_points(self.model, self.encoded)
        return self.encoded.loss(logits).double().cpu(), self.encoded.correct(logits).cpu()

    def mask(self, place: str) -> Tensor:
        """(rows, tokens) bool: the positions of a place in the text (Encoded.mask), on the model's device."""
        return self.encoded.mask(place).to(next(self.model.parameters()).device)


class QueryReplay:
    """As Replay, for what is changed at the query alone: the tokens before it are read once, into a cache, and only the
    prompt's last token and those behind it run again. The prompts of a batch have one length (Encoded.batches)."""

    @torch.no_grad()
    def __init__(self, model: Any, encoded: Encoded):
        self.model, self.encoded = model, encoded
        self.ids, self.begin = encoded.padded(next(model.parameters()).device), int(encoded.query[0])
        self.mask = torch.ones_like(self.ids[:, self.begin :], dtype=torch.bool)  # of all that runs again
        self.name, self.cache = find_cache(model(input_ids=self.ids[:, : self.begin], use_cache=True, logits_to_keep=1))
        if not self.name:
            raise ValueError("the model returns no cache")
        self.loss = self.losses()

    @torch.no_grad()
    def losses(self) -> Tensor:
        """(questions,): the loss of the model as it is now, which differs from what it was at the query alone."""
        cache = {self.name: copy.deepcopy(self.cache)}
        logits = self.model(input_ids=self.ids[:, self.begin :], use_cache=True, **cache).logits
        row, position = self.encoded.points.to(logits.device).unbind(1)
        return self.encoded.loss(logits[row, position - self.begin]).double().cpu()


@contextmanager
def skipped(blocks: tuple[nn.Module, ...], outputs: list[Any]) -> Iterator[None]:
    """Blocks that compute nothing and return what is given."""
    own = [vars(block).get("forward") for block in blocks]  # accelerate puts one there
    try:
        for block, output in zip(blocks, outputs, strict=True):
            block.forward = lambda *_, output=output, **__: output
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                block.forward = forward
