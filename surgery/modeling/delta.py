"""Mixers of the gated delta rule: Gated DeltaNet (arXiv 2412.06464; Qwen3-Next, Qwen3.5, OLMo-Hybrid) and Kimi Delta Attention
(arXiv 2510.26692; Kimi Linear), with attention at some heads.

For each token t a layer projects its input to a gate z, a query q, a key k, a value v, a rate beta in (0, 1) (in OLMo-Hybrid in
(0, 2)) and a decay alpha in (0, 1); q, k and v then pass a short convolution and SiLU, and q and k are scaled to length 1. A
head keeps a state S (n x p), which forgets what it held for a key as far as it writes a new value for it:

    S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,    y_t = S_t^T q_t / sqrt(n)

alpha_t is one number a head in Gated DeltaNet, and one for each of the n channels of a key in Kimi Delta Attention. With the
recursion written out,

    y_t = sum_{s<=t} (q_t . P_{s,t} k_s) beta_s v_s / sqrt(n),    P_{s,t} = prod_{r=s+1..t} (I - beta_r k_r k_r^T) diag(alpha_r)

Where keys are orthogonal, P is the decay alone, and this is linear attention with query q, key k, value v and beta_s in the
place of Mamba-2's time step: log beta_s is how strongly a token is written. The *dual graft* of a head keeps v, norm, gate and
output projection, and replaces the sum alone:

    y_t = sigma sum_{s<=t} softmax_s(sigma tau SHARPNESS q'_t . k'_s + log beta_s) v_s

q' and k' come from the graft's own projections and convolution, which start as copies of the base's rows, and have length 1 as
well. The null key and the gate are those of all grafts (graft.py). What differs from Mamba-2:

- The scores of the base lie in [-1, 1], so that softmax could not tell a match from the rest at tau = 1. SHARPNESS is what one
  unit of tau is (docs/derivations.md).
- The norm takes every scale out of a head's output, so it does not matter that softmax averages where the base sums.
- The erasing of the delta rule is left out, as the decay is. Of a key that occurs several times the base reads the last value,
  the graft the mean of all; trained, it can tell them apart by what the convolution leaves of their context.
- Queries and keys are as wide as the base's: random dimensions beyond those would take their share of the length.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from .graft import GraftMixer, Streams, convolve
from .packing import Packing
from .ssm import time_step

try:
    from surgery.kernels.delta import delta_rule, delta_step, unit
except ImportError:
    from .delta_reference import delta_rule, delta_step, unit

SHARPNESS = 32.0  # chosen by trial (docs/derivations.md)


class DeltaMixer(GraftMixer):
    """A mixin before a mixer of the gated delta rule. Keys are k, queries q, values v; Streams.decay is log alpha.

    A subclass says what its sizes are called: num_heads, n_groups (of queries and keys), ssm_state_size, head_v_dim, key_dim,
    value_dim; and where its projections are: parts(hidden (b, t, d)) -> q, k and v side by side (b, t, channels of the
    convolution), z (b, t, h * p), what beta is made of (b, t, h), and what `log_decay` takes.
    """

    widens = False  # whether a graft's queries and keys may be wider than the base's
    projection_bias = False
    most_rate = 1.0  # of beta

    def log_decay(self: Any, a: Tensor) -> Tensor:
        """log alpha, (b, t, h) or (b, t, h, n), in float32 at least."""
        return -torch.exp(self.A_log.float()) * time_step(a.float() + self.dt_bias)

    def project(
        self: Any, hidden: Tensor, cache: Cache | None = None, mask: Tensor | None = None, packing: Packing | None = None
    ) -> Streams:
        qkv, z, b, a = self.parts(hidden)
        qkv = convolve(qkv, self.conv1d, self.activation, cache, self.layer_idx, mask, packing)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = (m.unflatten(-1, (self.n_groups, self.ssm_state_size)) for m in (q, k))
        v, z = (m.unflatten(-1, (self.num_heads, self.head_v_dim)) for m in (v, z))
        decay = self.log_decay(a)
        rate = (b.sigmoid() * self.most_rate).to(decay.dtype)
        if mask is not None:  # padding neither writes to the state nor lets it decay
            rate = rate * mask[..., None]
            decay = decay.masked_fill(~mask.view(*mask.shape, *[1] * (decay.dim() - 2)), 0)
        return Streams(v, k, q, z, write=rate, decay=decay)

    def scan(self: Any, streams: Streams, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        assert streams.write is not None
        assert streams.decay is not None
        rate = streams.write.to(streams.x.dtype)  # as in transformers
        inputs = streams.q, streams.k, streams.x, streams.decay, rate
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and rate.shape[1] == 1:
            return delta_step(state, *(m[:, 0] for m in inputs))[:, None]
        y, last = delta_rule(*inputs, state, packing=packing)
        if cache is not None:
            cache.update_recurrent_state(last, layer_idx=self.layer_idx)  # type: ignore[arg-type]
        return y

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of length 1, but for SHARPNESS."""
        q, k = ((unit(m) * math.sqrt(SHARPNESS)).to(m.dtype) for m in (q, k))
        return q, k

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        y = self.norm(y.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
        return self.out_proj(y.to(gate.dtype).view(*gate.shape[:-2], -1))

    def query_key_rows(self: Any, make: Callable[[nn.Module], Tensor]) -> dict[str, list[Tensor | None]]:
        """q and k, in their projections and in the convolution."""
        sizes = self.n_groups, self.ssm_state_size
        taps = self.conv1d.weight.split([self.key_dim, self.key_dim, self.value_dim])
        bias = (None, None) if self.conv1d.bias is None else self.conv1d.bias.split(self.key_dim)[:2]
        rows = zip("qk", self.projected_rows(make), taps[:2], bias, strict=True)
        return {
            side: [weight, None, tap.unflatten(0, sizes), None if b is None else b.unflatten(0, sizes)]
            for side, weight, tap, b in rows
        }

    def projected_rows(self: Any, make: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, (groups, n, d) each."""
        q, k = (make(each).unflatten(0, (self.n_groups, self.ssm_state_size)) for each in (self.q_proj, self.k_proj))
        return q, k


class GatedDeltaMixer(DeltaMixer):
    """A mixin before a mixer of Gated DeltaNet: its heads decay as a whole, and several may share a query and a key."""

    num_heads = property(lambda self: self.num_v_heads)
    n_groups = property(lambda self: self.num_k_heads)
    ssm_state_size = property(lambda self: self.head_k_dim)
    head_dim = property(lambda self: self.head_v_dim)


class SplitDeltaMixer(GatedDeltaMixer):
    """Qwen3.5's, with a projection of queries, keys and values and one of each of the others."""

    def parts(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.in_proj_qkv(hidden), self.in_proj_z(hidden), self.in_proj_b(hidden), self.in_proj_a(hidden)

    def projected_rows(self: Any, make: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor]:
        q, k = make(self.in_proj_qkv)[: 2 * self.key_dim].unflatten(0, (2, self.n_groups, -1))
        return q, k
