"""What layer grafts and all that hybrids have in common both need."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm

from surgery.kernels.conv import causal_conv
from surgery.kernels.functions import autocasts
from surgery.kernels.norm import rms_norm
from surgery.kernels.packing import Packing

MOST = 256.0  # of what a projection in float16 is given


def fetching(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method of a module that reads tensors of its submodules `names` ("conv1d", "graft.qk_conv"; "": its own)
    without calling them. Where accelerate keeps those on the CPU or the disk (a device_map that does not fit), only a call
    fetches them: here their hooks are told of the method instead. transformers' force_accelerate_hooks does so for children
    alone. Each name whose module is not there is passed over."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def fetched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(getattr(_part(self, name), "_hf_hook", None) for name in names):
                return method(self, *args, **kwargs)
            with ExitStack() as after:  # what was fetched is put away again, also if something is raised
                for name in names:
                    module = _part(self, name)
                    if (hook := getattr(module, "_hf_hook", None)) is not None:
                        hook.pre_forward(module)
                        after.callback(hook.post_forward, module, None)
                return method(self, *args, **kwargs)

        return fetched

    return decorate


def _part(module: Any, name: str) -> Any:
    for part in filter(None, name.split(".")):
        module = getattr(module, part, None)
    return module


def fetched_state(model: Any) -> dict[str, Tensor]:
    """state_dict with what accelerate keeps on the CPU or the disk, all of it at once; of tied weights that are there, one."""
    state = model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", None) or ()
    for name in [name for name, tensor in state.items() if tensor.is_meta]:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if name in tied:
            del state[name]
            continue
        module._hf_hook.pre_forward(module)
        state[name] = getattr(module, leaf).detach().cpu()
        module._hf_hook.post_forward(module, None)
    return state


def take_hook(module: nn.Module, hook: Any) -> None:
    """Give a module a hook of accelerate that another module has: its tensors are then fetched from the same place."""
    from accelerate.hooks import add_hook_to_module  # whoever has a hook has accelerate

    own = copy.copy(hook)
    if hasattr(own, "hooks"):  # several in a row
        own.hooks = tuple(map(copy.copy, own.hooks))
    add_hook_to_module(module, own)


class RMSNorm(Mamba2RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def as_weight(x: Tensor, weight: Tensor) -> Tensor:
    """x in the dtype of the weight that it meets.

    As it is, though, where that is not the dtype of the computation: a quantised weight is stored in integers, and its module
    takes what comes; and under autocast, which casts by itself, float16 would only flush small gradients to zero on their way
    back.
    """
    return x if is_quantised_weight(weight) or autocasts(x.device.type) else x.to(weight.dtype)


def is_quantised_weight(weight: Tensor) -> bool:
    """Whether a weight is not what its module multiplies by: int8, two 4-bit numbers to a byte, or float8 beside its scales."""
    return not weight.is_floating_point() or weight.itemsize < 2


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """A block's norm of the stream x, in the dtype of the norm's weight. What a stream in float32 holds may be beyond float16's
    range; behind the norm it is not."""
    weight: Any = norm.weight
    return as_weight(norm(x), weight) if weight.dtype == torch.float16 else norm(as_weight(x, weight))


def gated(out_proj: nn.Module, y: Tensor, gate: Tensor) -> Tensor:
    """out_proj(y silu(gate)), y and gate (..., c), in the dtype of the gate, or, for float16, in float32: there the product and
    its projection may be beyond float16's range, so a token's own power of two is divided out before and multiplied after."""
    if gate.dtype != torch.float16:
        return out_proj((y * F.silu(gate)).to(gate.dtype))  # not the weight's dtype: a quantised one has integers
    return project_in_float16(out_proj, y.float() * F.silu(gate.float()))


def project_in_float16(out_proj: nn.Module, x: Tensor) -> Tensor:
    """What a projection that computes in float16 gives for x (..., c) in float32, in float32."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    scale = torch.exp2((largest / MOST).log2().ceil().clamp_min(0))
    return multiplied(out_proj((x / scale).half()), scale, bias_of(out_proj))


def multiplied(out: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """What a projection gives for scale * x, in float32, from what it gives for x (..., d). scale (..., 1)."""
    return out.float() * scale if bias is None else out.float() * scale + bias * (1 - scale)


def bias_of(module: nn.Module) -> Tensor | None:
    """A module's bias, also where accelerate keeps it on the CPU or the disk."""
    return None if getattr(module, "bias", None) is None else _fetched_bias(module)


@fetching("")
def _fetched_bias(module: Any) -> Tensor:
    return module.bias


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def time_step(x: Tensor) -> Tensor:
    """softplus, in float32 at least: float16 would have 0 for all x below -17, which has neither a logarithm nor a quotient."""
    return F.softplus(at_least_float32(x))


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Cache | None,
    layer: int,
    silu: bool = False,
    packing: Packing | None = None,
) -> Tensor:
    """x (b, t, c) behind its short causal convolution, within documents where several share a row. What the cache holds of
    earlier tokens stands before it, and the cache then holds the last of these."""
    t = x.shape[1]
    if cache is not None:
        x = cache.update_conv_state(x.transpose(1, 2), layer, conv_kernel_size=weight.shape[-1]).transpose(1, 2)
    return causal_conv(x, weight, bias, t, silu, packing=packing)


def gather_positions(positions: Tensor | None, states: Tensor) -> Tensor:
    """states (b, t, ...) at some of the b * t positions alone, (positions, ...); for None all of them, as they are."""
    return states if positions is None else states.flatten(0, 1)[positions]


def seen_keys(cache: Cache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the past and of these tokens, which the cache then holds."""
    k, v = cache.update(k, v, layer)
    length = int(cache.get_seq_length(layer))  # a static cache is longer than what it holds
    return k[:, :, :length], v[:, :, :length]
