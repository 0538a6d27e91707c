"""What layer grafts and all that hybrids have in common both need."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm

from surgery.kernels.conv import causal_conv
from surgery.kernels.norm import rms_norm


def fetching(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method of a module that reads tensors of its submodules `names` ("conv1d", "graft.qk_conv"; "": its own)
    without calling them. Where accelerate keeps those on the CPU or the disk (a device_map that does not fit), only a call
    fetches them: here their hooks are told of the method instead. transformers' force_accelerate_hooks does so for children
    alone. Each name whose module is not there is passed over."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def fetched(self: Any, *args: Any, **kwargs: Any) -> Any:
            hooked = []
            for name in names:
                module = self
                for part in filter(None, name.split(".")):
                    module = getattr(module, part, None)
                if (hook := getattr(module, "_hf_hook", None)) is not None:
                    hook.pre_forward(module)
                    hooked.append((module, hook))
            output = method(self, *args, **kwargs)
            for module, hook in reversed(hooked):
                hook.post_forward(module, None)
            return output

        return fetched

    return decorate


class RMSNorm(Mamba2RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, cache: Cache | None, layer: int, silu: bool = False) -> Tensor:
    """x (b, t, c) behind its short causal convolution. What the cache holds of earlier tokens stands before it, and the cache
    then holds the last of these."""
    t = x.shape[1]
    if cache is not None:
        x = cache.update_conv_state(x.transpose(1, 2), layer, conv_kernel_size=weight.shape[-1]).transpose(1, 2)
    return causal_conv(x, weight, bias, t, silu)


def at(positions: Tensor | None, states: Tensor) -> Tensor:
    """states (b, t, ...) at some of the b * t positions alone, (positions, ...); for None all of them, as they are."""
    return states if positions is None else states.flatten(0, 1)[positions]


def seen_keys(cache: Cache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the past and of these tokens, which the cache then holds."""
    k, v = cache.update(k, v, layer)
    length = int(cache.get_seq_length(layer))  # a static cache is longer than what it holds
    return k[:, :, :length], v[:, :, :length]
