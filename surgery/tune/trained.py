"""Which parameters tuning changes, and what is done to them meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.tune.lora import adapters


def trainable(model: PreTrainedModel, layers: list[int] | None) -> dict[str, nn.Parameter]:
    """The parameters that tuning changes, by name: those of grafts, or of the mixers of `layers` (but no integers of quantised
    ones), and those of adapters."""
    parts = [".graft."] if layers is None else [f".layers.{layer}.mixer." for layer in layers]
    own = {name: p for name, p in model.named_parameters() if any(part in name for part in parts) and p.is_floating_point()}
    return own | adapters(model)


@contextmanager
def training(
    model: PreTrainedModel, trained: dict[str, nn.Parameter], teacher: PreTrainedModel | None = None
) -> Iterator[dict[str, nn.Parameter]]:
    """Only these parameters have a gradient, and they are in float32 at least; afterwards all is as it was before. Raises
    UserError at the end if what was trained does not fit into the dtype that it had."""
    requires_grad = {p: p.requires_grad for part in filter(None, (teacher, model)) for p in part.parameters()}
    dtypes = {name: p.dtype for name, p in trained.items()}
    try:
        for p in requires_grad:
            p.requires_grad_(any(p is own for own in trained.values()))
        for p in trained.values():
            p.data = p.data.to(torch.promote_types(p.dtype, torch.float32))
        yield trained
        for name, p in trained.items():
            if p.isfinite().all() and not p.to(dtypes[name]).isfinite().all():
                kind = str(dtypes[name]).removeprefix("torch.")
                raise UserError(f"'{name}' was tuned beyond the range of {kind}; take a base in bfloat16 (dtype: bfloat16)")
    finally:
        model.eval()
        for p, before in requires_grad.items():
            p.requires_grad_(before)
            p.grad = None
        for name, p in trained.items():
            p.data = p.data.to(dtypes[name])
