"""What layer grafts and all that hybrids have in common both need."""

from torch import Tensor
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm

from surgery.kernels.conv import causal_conv
from surgery.kernels.norm import rms_norm
from surgery.kernels.packing import Packing


class RMSNorm(Mamba2RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


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


def at(positions: Tensor | None, states: Tensor) -> Tensor:
    """states (b, t, ...) at some of the b * t positions alone, (positions, ...); for None all of them, as they are."""
    return states if positions is None else states.flatten(0, 1)[positions]


def seen_keys(cache: Cache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the past and of these tokens, which the cache then holds."""
    k, v = cache.update(k, v, layer)
    length = int(cache.get_seq_length(layer))  # a static cache is longer than what it holds
    return k[:, :, :length], v[:, :, :length]
