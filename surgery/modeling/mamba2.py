"""Mamba-2 with attention at some heads: state-spaces' mamba2-*, Codestral-Mamba.

Notation of arXiv 2405.21060, which calls this kind of model SSD. For each token t a layer projects its input to a gate z, a
value x, a write vector B, a read vector C and a time step dt > 0; x, B and C then pass a short convolution and SiLU. A head
keeps a state S (head_dim x d_state), which decays by exp(A dt_t), A < 0, is written at every token, and is read:

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t

With the recursion written out, and a_t = A dt_t, the state is a sum over all earlier tokens s, and so is the output:

    y_t = sum_{s<=t} exp(a_{s+1} + ... + a_t) (C_t . B_s) dt_s x_s + D x_t

This is linear attention: C is the query, B the key, x the value, C_t . B_s the score, exp(...) a decay with the distance, and
dt_s says how much token s writes. The *dual graft* of a head keeps x, D, gate, norm and out_proj, and has attention beside the
sum:

    found_t = sigma sum_{s<=t} softmax_s(sigma tau C'_t . B'_s + log dt_s) x_s + D x_t

C' and B' come from the graft's own projections and convolution, which start as copies of the base's rows for C and B. The decay
is left out: softmax decides by the scores alone which tokens count, at any distance.

tau > 0, an inverse temperature, is learned; it starts at 1, or where the plan says. sigma is +1 or -1 and stays so: whatever
reads a head's output can turn its sign, so linear attention may have learned a match as its most *negative* score, which is as
good for it, and which softmax without sigma would never choose. log dt_s multiplies the weight of token s by dt_s, as in the
SSM: a token with a small time step draws little attention.

Softmax always returns an average, also where nothing matches. So each query sees one more key, the *null key*, with a learned
logit b and no value. What the softmax leaves to the other keys, m_t, is the share at which the graft is open:

    p_t = softmax([scores, b]),    m_t = 1 - p_t,null,    y_t = (1 - g m_t) ssm_t + g (sigma sum_s p_ts x_s + m_t D x_t)

ssm_t is the head's own output, D x_t included, and g a learned gate. Below a threshold m_t counts as 0 in inference, and then
y_t is ssm_t bit for bit. graft.py computes this for all families, and ssm.py the forward around the mixers, in the place of
transformers' blocks; here is what is Mamba-2's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, Mamba2Config, Mamba2ForCausalLM, Mamba2Model
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from .graft import GraftMixer, Streams, convolve
from .hybrid import Family, HybridConfig
from .packing import Packing
from .reference import at_least_float32
from .ssm import HybridBackbone, SSMLanguageModel, rms_norm, time_step

try:
    from surgery.kernels.ssd import ssd_scan, ssd_step
except ImportError:
    from .reference import ssd_scan, ssd_step  # type: ignore[assignment]


class SSDMixer(GraftMixer):
    """A mixin before a mixer of transformers of the kind of Mamba2Mixer: its methods go before those of the stock class."""

    gate_first = True  # whether in_proj's first rows are the gate's; a class where they are not overrides `project`

    def project(
        self: Any, hidden: Tensor, cache: Cache | None = None, mask: Tensor | None = None, packing: Packing | None = None
    ) -> Streams:
        gate, xBC, dt = self.read(hidden).split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
        xBC = convolve(xBC, self.conv1d, self.activation, cache, self.layer_idx, mask, packing)
        x, B, C = self.split_heads(xBC)
        dt = time_step(dt + self.dt_bias.to(dt.dtype)).clamp(*self.time_step_limit)
        dt = dt if mask is None else dt * mask[..., None]  # padding neither writes to the state nor lets it decay
        return Streams(x, k=B, q=C, gate=gate, write=dt)

    def read(self: Any, hidden: Tensor) -> Tensor:
        """What gate, x, B, C and dt are split from."""
        return self.in_proj(hidden)

    def split_heads(self: Any, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, t, channels) behind the convolution -> x (b, t, h, p), B and C (b, t, g, n)."""
        state = self.n_groups * self.ssm_state_size
        x, B, C = xBC.split([self.intermediate_size, state, state], dim=-1)
        B, C = (m.unflatten(-1, (self.n_groups, self.ssm_state_size)) for m in (B, C))
        return x.unflatten(-1, (self.num_heads, self.head_dim)), B, C

    def scan(self: Any, streams: Streams, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        A = -torch.exp(at_least_float32(self.A_log))
        assert streams.write is not None
        x, B, C = streams.x, streams.k, streams.q
        dt = streams.write.to(x.dtype)  # as transformers scans; what grafts read keeps its float32
        state: Any = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            # In place: the cache holds this state.
            return ssd_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], self.D)[:, None]
        y, state = ssd_scan(x, dt, A, B, C, self.D, state, packing=packing, chunk_size=self.chunk_size)
        if cache is not None:
            cache.update_recurrent_state(state, layer_idx=self.layer_idx)
        return y

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        return self.out_proj(rms_norm(self.norm, y.flatten(-2), gate).to(gate.dtype))

    def query_key_rows(self: Any, make: Callable[[nn.Module], Tensor]) -> dict[str, list[Tensor | None]]:
        """C and B, in in_proj and in the convolution."""
        inner, n, groups = self.intermediate_size, self.ssm_state_size, self.n_groups
        first, conv = inner if self.gate_first else 0, self.conv1d
        weight, bias = self.projection_rows(make)
        parts = []
        for tensor, start in ((weight, first), (bias, first), (conv.weight, 0), (conv.bias, 0)):
            rows = None if tensor is None else tensor[start + inner : start + inner + 2 * groups * n]
            parts.append((None, None) if rows is None else rows.unflatten(0, (2, groups, n)).unbind(0))
        return {"k": [k for k, _ in parts], "q": [q for _, q in parts]}

    def projection_rows(self: Any, make: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of what `read` computes."""
        return make(self.in_proj), self.in_proj.bias


class Mamba2HybridMixer(SSDMixer, Mamba2Mixer):
    """Keys are B, queries C, values x."""


class Mamba2HybridConfig(HybridConfig, Mamba2Config):
    """Mamba2Config with `grafts` (graft.py says what an entry holds)."""

    model_type = "mamba2_hybrid"

    grafts: list | None = None


class Mamba2HybridModel(HybridBackbone, Mamba2Model):
    """The backbone: all mixers are ours."""

    config_class = Mamba2HybridConfig
    mixer_class = Mamba2HybridMixer


class Mamba2HybridForCausalLM(SSMLanguageModel, Mamba2ForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = Mamba2HybridConfig
    backbone_class = Mamba2HybridModel


FAMILY = Family(Mamba2ForCausalLM, Mamba2HybridForCausalLM).register(Mamba2HybridModel)
