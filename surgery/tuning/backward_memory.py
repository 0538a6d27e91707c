"""How little a step keeps for its backward pass.

Weights that are not trained stay what they are: where autocast computes in another dtype, the backward pass gets the weight
itself and casts it again, instead of a copy of every weight that the forward pass cast (in a batch, twice: for the lesson and
for the text). And where the states within the blocks would take too much of the memory that is free, only what enters each
block is kept, and the block is computed once more on the way back. Neither changes a bit of the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from surgery.kernels.functions import PLAIN, autocasts
from surgery.models.quantised import has_quantised_weight
from surgery.runtime import memory

SHARE = 0.4  # of the memory that is free, for the states of one forward: a step has two, and the way back needs some as well
FEW = 2**27  # bytes that need no look at what is free

Checkpointing = bool | Literal["auto"]


class Recomputing:
    """Decides what is computed once more on the way back. auto: blocks whose states would not fit beside what is in memory, as
    measured on one row of what enters the first of them."""

    def __init__(self, checkpointing: Checkpointing):
        self.checkpointing = checkpointing
        self.kept: float | None = None  # by a block, in bytes per token

    @contextmanager
    def deciding(self, blocks: Sequence[Any], hidden: Tensor | None, forward: Callable[[Tensor], Any]) -> Iterator[None]:
        """While this lasts, the blocks keep only what enters them, if they are to. hidden (b, t, d) enters the first; forward:
        runs the first alone."""
        needed = torch.is_grad_enabled() and hidden is not None and self._needed(blocks, hidden, forward)
        chosen = [block for block in blocks if needed and hasattr(block, "gradient_checkpointing")]
        for block in chosen:
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=recomputed)
        try:
            yield
        finally:
            for block in chosen:
                block.gradient_checkpointing = False

    def _needed(self, blocks: Sequence[Any], hidden: Tensor, forward: Callable[[Tensor], Any]) -> bool:
        if self.checkpointing != "auto" or not any(block.training for block in blocks):
            return self.checkpointing is True
        if self.kept is None:
            self.kept = kept_per_token(forward, hidden[:1], blocks[0])
        kept = self.kept * hidden.shape[:2].numel() * len(blocks)
        return kept > FEW and kept > SHARE * memory.spare(hidden.device)


def step_fits(size: float, free: float) -> bool:
    """Whether `auto` lets a step keep so many bytes, about half of them of the lesson, and then as many of the text, where so
    many are free at its beginning."""
    return size / 2 <= SHARE * (free - size / 2)


def kept_per_token(forward: Callable[[Tensor], Any], hidden: Tensor, block: nn.Module) -> float:
    """Bytes that the forward of a block keeps of each token of hidden (b, t, d) for the backward pass. Weights count where they
    are no parameters of the block: fetched from elsewhere, or cast."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters() if not p.is_meta}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor.detach()  # an output that its own function kept would hold that function, and neither be ever freed

    devices = [hidden.device] if hidden.device.type == "cuda" else []
    with torch.random.fork_rng(devices), saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(hidden.detach().requires_grad_())
    return sum(storage.nbytes() for storage in kept.values()) / hidden.shape[:2].numel()


class KeepingWeights(TorchFunctionMode):
    """While this lasts, linear maps under autocast keep weights that are not trained as they are, and no copies of them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and not kwargs and _is_cast(*args):
            return _Linear.apply(*args)
        return function(*args, **kwargs)


def casts_fixed_weights(model: nn.Module) -> bool:
    """Whether autocast to bfloat16 casts weights of a model that are not trained."""
    linear = (m.weight for m in model.modules() if isinstance(m, nn.Linear) and not has_quantised_weight(m))
    return any(not w.requires_grad and w.dtype != torch.bfloat16 for w in linear)


def recomputed() -> tuple[Any, Any]:
    """What surrounds the two forwards of what is computed again: the second has to keep just what the first would have kept."""
    return KeepingWeights(), KeepingWeights()


def _is_cast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    if type(weight) not in PLAIN or weight.requires_grad or (bias is not None and bias.requires_grad):
        return False
    if not torch.is_grad_enabled() or not x.requires_grad or not autocasts(x.device.type):
        return False
    dtype = torch.get_autocast_dtype(x.device.type)
    return weight.dtype != dtype and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)


class _Linear(torch.autograd.Function):
    """As autocast computes it, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        device = x.device.type
        ctx.dtype, ctx.x_dtype, ctx.device = torch.get_autocast_dtype(device), x.dtype, device
        ctx.save_for_backward(weight)
        with torch.autocast(device, enabled=False):
            return F.linear(x.to(ctx.dtype), weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        with torch.autocast(ctx.device, enabled=False):
            return (dy @ weight.to(ctx.dtype)).to(ctx.x_dtype), None, None
