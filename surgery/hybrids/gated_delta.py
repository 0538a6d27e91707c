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
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import apply_mask_to_padding_states

from surgery.hybrids.dual import READ, DualGraft, DualMixer
from surgery.hybrids.parts import fetching, time_step
from surgery.kernels.delta import delta_matrix, delta_rule, delta_step, unit
from surgery.kernels.packing import Packing

SHARPNESS = 32.0  # in docs/ideas/derivations.md: below 8 a graft harms, from 32 on nothing more is gained


class DeltaGraft(DualGraft):
    """Queries and keys of length 1, unless they are a donor's."""

    def split(self, qk: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        """As DualGraft's; dt (b, t, 2, h): the rates, and the logarithms of the decay, which is left out."""
        if not self.direct:
            lengths = math.sqrt(SHARPNESS)
            qk = (unit(qk.unflatten(-1, (-1, self.width))) * lengths).to(qk.dtype).flatten(-2)
        return super().split(qk, dt[:, :, 0])


class DeltaMixer(DualMixer):
    """Stands before a stock mixer of this kind. A subclass says where its projections are.

    Among what DualMixer passes from step to step, x is v, B is k, C is q, and dt (b, t, 2, h) holds the rates beta and the
    logarithms of the decay alpha.
    """

    graft_class = DeltaGraft
    D = None
    most_rate = 1.0  # of beta

    num_heads = property(lambda self: self.num_v_heads)
    n_groups = property(lambda self: self.num_k_heads)  # of queries and keys
    ssm_state_size = property(lambda self: self.head_k_dim)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u (b, t, d) -> q, k and v side by side (b, t, channels of the convolution), z (b, t, h * p), and what beta and alpha
        are made of, (b, t, h) each."""
        raise NotImplementedError

    def project(
        self: Any, hidden_states: Tensor, cache_params: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple:  # fmt: skip
        """u (b, t, d) -> gate z (b, t, h, p), v (b, t, h, p), k and q (b, t, g, n), rates and log decays (b, t, 2, h) in
        float32 at least, and the grafts' queries and keys (b, t, 2 * pairs * width) or None. Updates the cache's conv state."""
        hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)
        qkv, z, b, a = self.parts(hidden_states)
        qkv, qk = self.convolve(hidden_states, qkv, cache_params, attention_mask, packing)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = (m.unflatten(-1, (self.num_k_heads, self.head_k_dim)) for m in (q, k))
        v, z = (m.unflatten(-1, (self.num_v_heads, self.head_v_dim)) for m in (v, z))
        log_decay = -torch.exp(self.A_log.float()) * time_step(a.float() + self.dt_bias)
        beta = (b.sigmoid() * self.most_rate).to(log_decay.dtype)
        return z, v, k, q, torch.stack([beta, log_decay], 2), qk

    def scan(
        self: Any, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, heads: list[int], cache_params: Cache | None,
        packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """The delta rule of `heads`, all or those that are not grafted: (b, t, heads, p). x (b, t, len(heads), p), dt (b, t, 2,
        len(heads)), B and C of all groups."""
        if len(heads) < self.num_heads and self.n_groups > 1:  # the remaining heads need not fill their groups evenly
            B, C = (self.graft.other_groups.of(m, 2) for m in (B, C))
        beta, log_decay = dt.unbind(2)
        beta = beta.to(x.dtype)  # as in transformers
        state = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            return delta_step(state, *(m[:, 0] for m in (C, B, x, log_decay, beta)))[:, None]
        y, state = delta_rule(C, B, x, log_decay, beta, state, packing=packing)
        if cache_params is not None:
            cache_params.update_recurrent_state(state, layer_idx=self.layer_idx)
        return y

    @fetching("", *READ)
    def matrices(self: Any, hidden_states: Tensor, rows: Tensor | None = None, heads: Sequence[int] | None = None) -> Tensor:
        """The mixing matrices of `heads` (of all, unless given) for one sequence (1, t, d): (heads, rows, t), such that y is
        M v. Grafted heads: their attention (where a blend gate is open, the mixture)."""
        _, _, k, q, dt, qk = self.project(hidden_states)
        matrix = delta_matrix(q, k, dt[:, :, 1], dt[:, :, 0], heads=heads, rows=rows)[0]
        return matrix if self.graft is None or qk is None else self.graft.into(matrix, qk, dt, rows, heads)

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        """Norm, gate and output projection: (..., h, p) -> (..., d)."""
        y = self.norm(y.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
        return self.out_proj(y.to(gate.dtype).view(*gate.shape[:-2], -1))


class FusedDeltaMixer(DeltaMixer):
    """Qwen3-Next's: in_proj_qkvz has query, key, values and gates of one group after the other."""

    in_proj = property(lambda self: self.in_proj_qkvz)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projected = self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(*projected)
        return torch.cat([m.flatten(2) for m in (q, k, v)], dim=-1), z.flatten(2), b, a


class SplitDeltaMixer(DeltaMixer):
    """Qwen3.5's."""

    in_proj = property(lambda self: self.in_proj_qkv)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projections = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        return tuple(projection(hidden_states) for projection in projections)


class SeparateDeltaMixer(DeltaMixer):
    """OLMo-Hybrid's: a projection for everything, and other names."""

    in_proj = property(lambda self: self.q_proj)
    norm = property(lambda self: self.o_norm)
    out_proj = property(lambda self: self.o_proj)
    most_rate = property(lambda self: 2.0 if self.allow_neg_eigval else 1.0)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = torch.cat([projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        return qkv, self.g_proj(hidden_states), self.b_proj(hidden_states), self.a_proj(hidden_states)
