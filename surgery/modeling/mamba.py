"""Mamba-1 with attention at some channels: state-spaces' mamba-*-hf.

A head of Mamba-1 is a channel (notation of arXiv 2312.00752; c: channel, n: state, D_{s,c}: its time step):

    y_{t,c} = sum_{s<=t} [ sum_n C_{t,n} exp(A_{c,n} (D_{s+1,c} + ... + D_{t,c})) B_{s,n} ] D_{s,c} x_{s,c} + D_c x_{t,c}

The bracket without its decay, C_t . B_s, is the same for all channels: the dual graft of a set of channels is one attention
with query C, key B and the channels' x as its value,

    y_{t,c} = sigma sum_{s<=t} softmax_s(sigma tau C'_t . B'_s + log D_{s,c}) x_{s,c} + D_c x_{t,c}

where only log D differs from channel to channel. It leaves the scores by

    sum_s e^{q.k_s} D_{s,c} x_{s,c} / sum_s e^{q.k_s} D_{s,c},

numerator and denominator being the same attention over D x and over D: a value twice as wide instead of scores for every
channel (both divided by the channels' largest D, which the scores get). A null key adds its e^b to the denominator
(ChannelGraft in graft.py). Channels with the same sigma, tau and b at the start share a query-key pair; there are as many
pairs as there are such sets. B and C are made from x by x_proj; C' and B' come from the graft's own copies of those rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, MambaConfig, MambaForCausalLM, MambaModel
from transformers.models.mamba.modeling_mamba import MambaMixer

from .graft import ChannelGraft, GraftMixer, Streams, convolve
from .hybrid import Family, HybridConfig
from .packing import Packing
from .reference import at_least_float32
from .ssm import HybridBackbone, SSMLanguageModel, gated, time_step

try:
    from surgery.kernels.selective import selective_scan, selective_step
except ImportError:
    from .reference import selective_scan, selective_step  # type: ignore[assignment]


class SelectiveMixer(GraftMixer):
    """A mixin before a mixer of transformers of the kind of MambaMixer. A head is a channel; keys are B, queries C, values
    x."""

    graft_class = ChannelGraft
    head_dim = n_groups = 1

    @property
    def num_heads(self: Any) -> int:
        return self.intermediate_size

    def project(
        self: Any, hidden: Tensor, cache: Cache | None = None, mask: Tensor | None = None, packing: Packing | None = None
    ) -> Streams:
        x, gate = self.in_proj(hidden).chunk(2, dim=-1)
        x = convolve(x, self.conv1d, self.activation, cache, self.layer_idx, mask, packing)
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        dt, B, C = self.normalise(*self.x_proj(x).split(sizes, dim=-1))
        dt = time_step(self.dt_proj(dt))
        dt = dt if mask is None else dt * mask[..., None]  # padding neither writes to the state nor lets it decay
        return Streams(x[..., None], B[:, :, None], C[:, :, None], gate, write=dt)

    def normalise(self, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What Falcon-Mamba and Jamba do to them, and Mamba-1 does not."""
        return dt, B, C

    def scan(self: Any, streams: Streams, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        assert streams.write is not None
        A, x, dt = -torch.exp(at_least_float32(self.A_log)), streams.x[..., 0], streams.write
        B, C, D = streams.k[:, :, 0], streams.q[:, :, 0], at_least_float32(self.D)
        dt = dt.to(x.dtype)  # as in transformers
        state: Any = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            return selective_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)[:, None, :, None]
        y, state = selective_scan(x, dt, A, B, C, D, state, packing=packing)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        return y[..., None]

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        return gated(self.out_proj, y[..., 0], gate)

    def query_key_rows(self: Any, make: Callable[[nn.Module], Tensor]) -> dict[str, list[Tensor | None]]:
        """C and B, in x_proj."""
        _, B, C = make(self.x_proj).split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size])
        return {"k": [B[None], None, None, None], "q": [C[None], None, None, None]}


class NormedSelectiveMixer(SelectiveMixer):
    """One that normalises dt, B and C before the scan, and queries and keys of a graft in the same way."""

    def normalise(self: Any, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)

    def prepare(self: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The norms, on as many of the leading dimensions as B and C have."""
        n = self.ssm_state_size
        q = torch.cat([self.c_layernorm(q[..., :n]), q[..., n:]], dim=-1)
        return q, torch.cat([self.b_layernorm(k[..., :n]), k[..., n:]], dim=-1)


class MambaHybridMixer(SelectiveMixer, MambaMixer):
    """The mixer of Mamba-1."""


class MambaHybridConfig(HybridConfig, MambaConfig):
    """MambaConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "mamba_hybrid"

    grafts: list | None = None


class MambaHybridModel(HybridBackbone, MambaModel):
    """The backbone: all mixers are ours."""

    config_class = MambaHybridConfig
    mixer_class = MambaHybridMixer


class MambaHybridForCausalLM(SSMLanguageModel, MambaForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = MambaHybridConfig
    backbone_class = MambaHybridModel


FAMILY = Family(MambaForCausalLM, MambaHybridForCausalLM).register(MambaHybridModel)
