"""Which parameters tuning changes, and how the model is prepared for that."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.loading.opened import Checkpoint, model_of
from surgery.models.anatomy import mixer_at
from surgery.models.quantised import has_quantised_weight
from surgery.splicing.splice import graft_parameters, ungrafted
from surgery.tuning.lora import adapters


def trainable(model: PreTrainedModel, layers: list[int] | None) -> dict[str, nn.Parameter]:
    """The parameters that tuning changes, by name: those of the grafts, or of the mixers of `layers`, and those of adapters.
    Parameters of quantised modules are left out: integers have no gradient, and bitsandbytes changes the dtype of the biases in
    every forward."""
    fixed = {id(p) for module in model.modules() if has_quantised_weight(module) for p in module.parameters(recurse=False)}
    if layers is None:
        named = graft_parameters(model)
    else:
        mixers = {id(mixer_at(model, layer)) for layer in layers}
        parts = [f"{name}." for name, module in model.named_modules() if id(module) in mixers]
        named = {name: p for name, p in model.named_parameters() if any(part in name for part in parts)}
    return {name: p for name, p in named.items() if p.is_floating_point() and id(p) not in fixed} | adapters(model)


def with_own_mixers(base: PreTrainedModel | Checkpoint, layers: list[int]) -> PreTrainedModel:
    """The base adopted, as the control that `tune` trains with these `layers`: what is trained there is a copy, all else the
    base's own. Adapters (tune.lora) need no copies, as they are merged into some of their own."""
    return own_mixers(ungrafted(model_of(base, "tune")), layers)  # adopt() would return an adopted base itself


def own_mixers(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """The model itself, with a copy of what it shares with its base in the mixers of `layers`."""
    copies = {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in trainable(model, layers).values()}
    for name, p in list(model.named_parameters(remove_duplicate=False)):
        if id(p) in copies:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, copies[id(p)])
    return model


@contextmanager
def training(
    model: PreTrainedModel, trained: dict[str, nn.Parameter], teacher: PreTrainedModel | None = None
) -> Iterator[dict[str, nn.Parameter]]:
    """Give these parameters alone a gradient, in float32 or wider. At the end everything is put back as it was, except their
    values. Raises UserError at the end if a trained value does not fit into its former dtype."""
    requires_grad = {p: p.requires_grad for part in filter(None, (teacher, model)) for p in part.parameters()}
    dtypes = {name: p.dtype for name, p in trained.items()}
    # A forward in another dtype rounds the biases of bitsandbytes' modules in place.
    quantised = [module for part in filter(None, (teacher, model)) for module in part.modules() if has_quantised_weight(module)]
    biases = [(module.bias, module.bias.data) for module in quantised if module.bias is not None]
    try:
        for p in requires_grad:
            p.requires_grad_(any(p is own for own in trained.values()))
        for p in trained.values():
            p.data = p.data.to(torch.promote_types(p.dtype, torch.float32))
        yield trained
        for name, p in trained.items():
            if p.isfinite().all() and not p.to(dtypes[name]).isfinite().all():
                kind = str(dtypes[name]).removeprefix("torch.")
                raise UserError(
                    f"after tuning, '{name}' is beyond the range of {kind}; use a base in bfloat16 (dtype: bfloat16)"
                )
    finally:
        model.eval()
        for bias, data in biases:
            bias.data = data
        for p, before in requires_grad.items():
            p.requires_grad_(before)
            p.grad = None
        for name, p in trained.items():
            p.data = p.data.to(dtypes[name])
