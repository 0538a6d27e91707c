"""Some of a model's blocks, run by the model's own forward.

What a block takes besides states (masks by layer, rotary embeddings, the embeddings once more), and what is done before the
blocks and behind them, is a model's own affair. So its backbone is called with the tokens; blocks that are left out hand on
what enters them, and the first one that is run may get other states than those that reach it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.hybrids.parts import gather_positions
from surgery.locating.recording import with_states
from surgery.locating.substitution import Shape, block_shapes, tensor_of
from surgery.models.anatomy import block_list


class StandIn(nn.Module):
    """In the place of a block, with what else may be asked of it."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class Passing(StandIn):
    """A block that is left out."""

    def __init__(self, block: nn.Module, shape: Shape):
        super().__init__(block)
        self.shape = shape

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args[0] if args else kwargs["hidden_states"]
        return self.shape.around(self.seen)


class Running(StandIn):
    """A block that gets `states`, if there are any, and gives those at `positions` alone, (positions, d), if there are any."""

    def __init__(self, block: nn.Module, states: Tensor | None, positions: Tensor | None):
        super().__init__(block)
        self.states, self.positions = states, positions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.states is not None:
            args, kwargs = with_states(args, kwargs, self.states)
        if self.positions is not None and keeps_positions(self.block):
            kwargs |= {"positions_to_keep": self.positions}
        returned = self.block(*args, **kwargs)
        self.seen = tensor_of(returned)
        if self.positions is None or keeps_positions(self.block):
            return returned
        return Shape.of(returned).around(gather_positions(self.positions, self.seen)[None])


class PartialRun:
    """Of a language model, whose blocks are `blocks`."""

    def __init__(self, model: Any):
        self.decoder, self.blocks = model.base_model, block_list(model)
        self._shapes: list[Shape] | None = None

    def __call__(
        self, ids: Tensor, blocks: Sequence[nn.Module], first: int, stop: int, *, states: Tensor | None = None,
        positions: Tensor | None = None, norm: bool = False, **more: Any,
    ) -> Tensor:  # fmt: skip
        """The states (b, t, d) of ids (b, t) behind blocks[first:stop], and behind the model's last norm if `norm` is True.
        blocks: one for each of the model's. states: what enters the first, unless it is what the model gives it. positions:
        which of the b * t last states are wanted, behind the norm, then (positions, d). more: for the backbone."""
        shapes, places = self._known_shapes(ids.device), list(blocks)
        for i, block in enumerate(blocks):
            if not first <= i < stop:
                places[i] = Passing(block, shapes[i])
            elif i in (first, stop - 1):
                places[i] = Running(block, states if i == first else None, positions if i == stop - 1 else None)
        with swapped_blocks(self.blocks, places):
            last = self.decoder(input_ids=ids, use_cache=False, **more).last_hidden_state
        if norm:
            return last if positions is None else last.reshape(-1, last.shape[-1])
        return places[max(first, stop - 1)].seen  # type: ignore[return-value]

    def _known_shapes(self, device: torch.device) -> list[Shape]:
        if self._shapes is None:
            if all(map(keeps_positions, self.blocks)):  # ours
                self._shapes = [Shape(None)] * len(self.blocks)
            else:
                with evaluated(self.decoder):
                    self._shapes = block_shapes(self.decoder, list(self.blocks), device)
        return self._shapes


def keeps_positions(block: nn.Module) -> bool:
    """Whether a block's forward takes `positions_to_keep`, and does no more than mix at the others."""
    return getattr(block, "keeps_positions", False)


@contextmanager
def swapped_blocks(blocks: nn.ModuleList, others: Sequence[nn.Module]) -> Iterator[None]:
    """Put other blocks in the places of a model's for a while."""
    own = list(blocks)
    try:
        for i, block in enumerate(others):
            blocks[i] = block
        yield
    finally:
        for i, block in enumerate(own):
            blocks[i] = block


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """While this lasts nothing is dropped at random."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
