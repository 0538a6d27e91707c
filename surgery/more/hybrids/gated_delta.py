"""The mixer of Gated DeltaNet (arXiv 2412.06464): Qwen3-Next, Qwen3.5, OLMo-Hybrid.

For each token t a layer projects its input to a gate z, a query q, a key k, a value v, a rate beta in (0, 1) (in OLMo-Hybrid
in (0, 2)) and a decay alpha in (0, 1); q, k and v then pass a short convolution and SiLU, and q and k are scaled to length 1. A
head keeps a state S (P x N), which forgets what it held for a key as far as it writes a new value for it:

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    y_t = S_t q_t / sqrt(N)

and then out_proj(norm(y) silu(z)), with a norm over each head's own channels. With the recursion written out,

    y_t = sum_{s<=t} (q_t . P_{s,t} k_s) beta_s v_s / sqrt(N),    P_{s,t} = prod_{r=s+1..t} alpha_r (I - beta_r k_r k_r^T)

Where keys are orthogonal, P is the decay alone, and this is linear attention with query q, key k, value v and beta_s in the
place of Mamba-2's time step. The *dual graft* of a head keeps v, norm, gate and out_proj, and replaces the sum alone:

    y_t = sigma sum_{s<=t} softmax_s(sigma tau SHARPNESS q'_t . k'_s + log beta_s) v_s

q' and k' come from the graft's own projections and convolution, which start as copies of the base's rows, and have length 1 as
well. What differs from Mamba-2:

- The scores of the base lie in [-1, 1], so that softmax could not tell a match from the rest at tau = 1. SHARPNESS is what one
  unit of tau is; docs/ideas/derivations.md has the measurements behind it.
- The norm takes every scale out of a head's output: it does not matter that softmax averages where the base sums.
- The erasing of the delta rule is left out, as the decay is. Of a key that occurs several times the base reads the last value,
  the graft the mean of all; trained, it can tell them apart by what the convolution leaves of their context.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import apply_mask_to_padding_states

from surgery.hybrids.dual import DualMixer, DualProjected
from surgery.hybrids.mixer import SMALLEST
from surgery.hybrids.parts import time_step
from surgery.kernels.delta import delta_matrix, delta_rule, delta_step, unit
from surgery.kernels.packing import Packing

SHARPNESS = 32.0  # in docs/ideas/derivations.md: below 8 a graft harms, from 32 on nothing more is gained


@dataclass(eq=False)
class DeltaProjected(DualProjected):
    """rate (b, t, h), log_decay (b, t, h) or (b, t, h, n): beta, and the logarithm of alpha, in float32 at least."""

    rate: Tensor
    log_decay: Tensor


class DeltaMixer(DualMixer):
    """Of the gated delta rule. A subclass says where its projections are, and what its sizes are called."""

    most_rate = 1.0  # of beta

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u (b, t, d) -> q, k and v side by side (b, t, channels of the convolution), z (b, t, h * p), what beta is made of (b,
        t, h), and what `log_decay` takes."""
        raise NotImplementedError

    def log_decay(self: Any, a: Tensor) -> Tensor:
        """The logarithm of alpha, (b, t, h), or, where each channel of the keys has its own, (b, t, h, n)."""
        raise NotImplementedError

    def project(
        self: Any, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> DeltaProjected:  # fmt: skip
        hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)
        qkv, z, b, a = self.parts(hidden_states)
        qkv, qk = self.convolve(hidden_states, qkv, cache, attention_mask, packing)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = (m.unflatten(-1, (self.n_groups, self.ssm_state_size)) for m in (q, k))
        v, z = (m.unflatten(-1, (self.num_heads, self.head_v_dim)) for m in (v, z))
        log_decay = self.log_decay(a)
        beta = (b.sigmoid() * self.most_rate).to(log_decay.dtype)
        return DeltaProjected(v, k, q, z, qk, beta, log_decay)

    def prepare(self: Any, qk: Tensor) -> Tensor:
        """Queries and keys of length 1, but for SHARPNESS."""
        return (unit(qk.unflatten(-1, (-1, self.graft.width))) * math.sqrt(SHARPNESS)).to(qk.dtype).flatten(-2)

    def log_write(self: Any, projected: DeltaProjected) -> Tensor:
        return self.graft.grafted.of(projected.rate, -1).clamp_min(SMALLEST).log()

    def scan(self: Any, projected: DeltaProjected, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        k, q, v = projected.keys, projected.queries, self.of_scanned(projected.values, 2)
        if len(self.ssm_heads) < self.num_heads and self.n_groups > 1:  # the remaining heads need not fill their groups evenly
            k, q = (self.graft.other_groups.of(m, 2) for m in (k, q))
        rate = self.of_scanned(projected.rate, -1).to(v.dtype)  # as in transformers
        inputs = (q, k, v, self.of_scanned(projected.log_decay, 2), rate)
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and v.shape[1] == 1:
            return delta_step(state, *(m[:, 0] for m in inputs))[:, None]
        y, state = delta_rule(*inputs, state, packing=packing)
        if cache is not None:
            cache.update_recurrent_state(state, layer_idx=self.layer_idx)
        return y

    def own_matrices(self: Any, projected: DeltaProjected, rows: Tensor | None, heads: Sequence[int] | None) -> Tensor:
        q, k = projected.queries, projected.keys
        return delta_matrix(q, k, projected.log_decay, projected.rate, heads=heads, rows=rows)[0]

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        y = self.norm(y.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
        return self.out_proj(y.to(gate.dtype).view(*gate.shape[:-2], -1))


class GatedDeltaMixer(DeltaMixer):
    """A mixin before a stock mixer of Gated DeltaNet, whose heads decay as a whole."""

    num_heads = property(lambda self: self.num_v_heads)
    n_groups = property(lambda self: self.num_k_heads)  # of queries and keys
    ssm_state_size = property(lambda self: self.head_k_dim)

    def log_decay(self: Any, a: Tensor) -> Tensor:
        return -torch.exp(self.A_log.float()) * time_step(a.float() + self.dt_bias)


class FusedDeltaMixer(GatedDeltaMixer):
    """Qwen3-Next's: in_proj_qkvz has query, key, values and gates of one group after the other."""

    in_proj = property(lambda self: self.in_proj_qkvz)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projected = self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(*projected)
        return torch.cat([m.flatten(2) for m in (q, k, v)], dim=-1), z.flatten(2), b, a


class SplitDeltaMixer(GatedDeltaMixer):
    """Qwen3.5's and Qwen4's."""

    in_proj = property(lambda self: self.in_proj_qkv)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projections = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        return tuple(projection(hidden_states) for projection in projections)


class SeparateDeltaMixer(GatedDeltaMixer):
    """OLMo-Hybrid's: a projection for everything, and other names."""

    in_proj = property(lambda self: self.q_proj)
    norm = property(lambda self: self.o_norm)
    out_proj = property(lambda self: self.o_proj)
    most_rate = property(lambda self: 2.0 if self.allow_neg_eigval else 1.0)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = torch.cat([projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        return qkv, self.g_proj(hidden_states), self.b_proj(hidden_states), self.a_proj(hidden_states)
