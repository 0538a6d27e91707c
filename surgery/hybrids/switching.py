"""A hybrid with its grafts switched off: for a while it computes what its base computes, bit for bit."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.hybrids.layer_graft import LayerGraftMixer
from surgery.hybrids.parts import take_hook
from surgery.hybrids.patching import note_of, with_class
from surgery.hybrids.windows import WindowedAttention, is_window


@contextmanager
def grafts_off(model: Any) -> Iterator[None]:
    """While this lasts, `model` (a hybrid's language model) is its base: its grafts and its merged adapters do nothing.

    A cache that was filled meanwhile holds no keys of the grafts, so it ends with the context. Raises UserError for a layer
    graft that does not hold what it replaced: an exported folder does not. Nor is a hybrid whose state was cut its base.
    """
    if any("whole_state" in spec for spec in model.config.grafts):
        raise UserError("the state of this hybrid is smaller than its base's, also with the grafts switched off; load the base")
    config, layers = model.config, model.base_model.layers
    with ExitStack() as after:
        after.callback(setattr, config, "grafts", config.grafts)
        specs = [spec for spec in config.grafts if not spec.get("of_base")]
        config.grafts = [spec for spec in config.grafts if spec.get("of_base")]
        for layer in [spec["layer"] for spec in specs if is_window(spec)]:
            for module in layers[layer].modules():
                if isinstance(module, WindowedAttention) and layer in module.windows:
                    after.callback(module.windows.__setitem__, layer, module.windows.pop(layer))
                elif isinstance(module, LayerGraftMixer):
                    after.callback(setattr, module, "window", module.window)
                    module.window = None
        for index in [spec["layer"] for spec in specs if not is_window(spec)]:
            mixer = model.mixer_at(index)
            if isinstance(mixer, LayerGraftMixer):
                after.callback(layers.__setitem__, index, layers[index])
                layers[index] = _base_block(model, index)
            elif not model.all_mixers:
                after.enter_context(with_class(mixer, model.stock_mixer))
            else:
                for name in ("graft", "ssm_heads"):
                    after.callback(setattr, mixer, name, getattr(mixer, name))
                mixer.graft, mixer.ssm_heads = None, sorted([*mixer.ssm_heads, *set(mixer.graft.heads) - {*mixer.ssm_heads}])
        for name, tensor in note_of(model, "unadapted", {}).items():
            if (merged := _exchange(model, name, tensor)) is not None:
                after.callback(_exchange, model, name, merged)
        yield


def _base_block(model: Any, index: int) -> nn.Module:
    """The block that a layer graft has replaced, made of what the graft keeps of it and of what the two have in common."""
    block, mixer = model.base_model.layers[index], model.mixer_at(index)
    if not mixer.removed:
        raise UserError(
            f"the layer graft in L{index} cannot be switched off: the folder that the hybrid was loaded from does not hold what"
            " the graft replaced; load the base, or splice it anew"
        )
    with torch.device("meta"):
        base_block = type(model)(model.config).base_model.layers[index]
    here = model.block_name(index)
    for name, module in mixer.removed_modules.items():
        base_block.set_submodule(name.removeprefix(here), module)
    common = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    for name in [name for name, _ in (*base_block.named_parameters(), *base_block.named_buffers())]:
        _exchange(base_block, name, mixer.removed.get(here + name, common.get(name)))
    for name, hook in note_of(model, "base_hooks", {}).items():
        if f"{name}.".startswith(here):
            take_hook(base_block.get_submodule(f"{name}.".removeprefix(here).rstrip(".")), hook)
    return base_block.train(block.training)


def _exchange(module: nn.Module, name: str, tensor: Tensor | None) -> Tensor | None:
    """Put a tensor at the place of a parameter or buffer, whose module is found by its name; what was there is returned.
    Without such a module, or such a tensor, nothing happens."""
    owner: Any = module
    *path, leaf = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or tensor is None:
        return None
    kind = owner._parameters if leaf in owner._parameters else owner._buffers
    before, kind[leaf] = kind.get(leaf), tensor
    return before
