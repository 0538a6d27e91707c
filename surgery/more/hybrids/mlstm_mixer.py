"""The mixer of xLSTM with a matrix memory, mLSTM (arXiv 2405.04517).

For each token t a layer projects its input to a query q, a key k, a value v, an output gate o, and for each head what stands
before an input gate, l, and before a forget gate, m; both are bounded softly. A head keeps a memory C (P x N) and a sum of keys
n:

    C_t = f_t C_{t-1} + i_t v_t k_t^T,    n_t = f_t n_{t-1} + i_t k_t,    i_t = exp(l_t),  f_t = sigmoid(m_t)
    y_t = C_t q_t / max(|n_t . q_t|, 1)                                   with q divided by sqrt(N)

and then out_proj(sigmoid(o) norm(y)), with a LayerNorm over each head's own channels. With the recursion written out,

    y_t = sum_{s<=t} w_ts v_s / max(|sum_{s<=t} w_ts|, 1),    w_ts = f_{s+1} ... f_t exp(l_s) (q_t . k_s)

So mLSTM is a weighted average already, wherever the sum of its weights exceeds 1; only that a weight may be negative. The *dual
graft* of a head keeps v, norm, gate and out_proj, makes exp(q . k) of the factor q . k, and leaves the decay out:

    y_t = sigma sum_{s<=t} softmax_s(sigma tau q'_t . k'_s + l_s) v_s

q' and k' come from the graft's own projections, which start as copies of the base's rows; the division by sqrt(N) is part of
the score. What differs from Mamba-2:

- The input gate is exponential: the logarithm of the write strength, in the place of Mamba-2's log dt, is l itself.
- The norm takes every scale out of a head's output: it does not matter where the base's denominator is 1, and its output a sum.
- There is no convolution: within one layer a key never meets the value beside it. The gather step takes a layer of its own, as
  in a Transformer, and the aggregate heads are in a later one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.models.xlstm.modeling_xlstm import soft_cap

from surgery.hybrids.dual import DualMixer, DualProjected
from surgery.kernels.mlstm import mlstm_matrix, mlstm_scan, mlstm_step
from surgery.kernels.packing import Packing

LEAST = -70.0  # of what is added to a score: of a token that is not written


@dataclass(eq=False)
class MLSTMProjected(DualProjected):
    """write, forget (b, t, h): l and m."""

    write: Tensor
    forget: Tensor


class MLSTMMixer(DualMixer):
    """A mixin before transformers' xLSTMLayer."""

    returns_pair = True

    num_heads = property(lambda self: self.config.num_heads)
    n_groups = num_heads  # every head has a query and a key of its own
    ssm_state_size = property(lambda self: self.qk_dim // self.num_heads)
    in_proj = property(lambda self: self.q if self.config.weight_mode == "single" else self.qkv_opreact)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """u (b, t, d) -> q, k, v and o, side by side for all heads (b, t, ...), l and m (b, t, h), before they are bounded."""
        if self.config.weight_mode == "single":
            projections = (self.q, self.k, self.v, self.ogate_preact, self.igate_preact, self.fgate_preact)
            return tuple(projection(hidden_states) for projection in projections)
        qkvo = self.qkv_opreact(hidden_states).split([self.qk_dim, self.qk_dim, self.v_dim, self.v_dim], dim=-1)
        return *qkvo, *self.ifgate_preact(hidden_states).chunk(2, dim=-1)

    def project(
        self: Any, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> MLSTMProjected:  # fmt: skip
        *qkv, gate, write, forget = self.parts(hidden_states)
        q, k, v = (m.unflatten(-1, (self.num_heads, -1)) for m in qkv)
        write, forget = (soft_cap(m, self.config.gate_soft_cap) for m in (write, forget))
        if attention_mask is not None:  # nothing is written at padding, and nothing forgotten
            pads = ~attention_mask.bool()[..., None]
            write, forget = write.masked_fill(pads, -torch.inf), forget.masked_fill(pads, torch.inf)
        qk = None if self.graft is None else self.graft.project(hidden_states)
        return MLSTMProjected(v, k, q, gate, qk, write, forget)

    def prepare(self: Any, qk: Tensor) -> Tensor:
        """Divided by the square root of their width, together."""
        return qk * self.graft.width**-0.25

    def log_write(self: Any, projected: MLSTMProjected) -> Tensor:
        return self.graft.grafted.of(projected.write, -1).clamp_min(LEAST)

    def scan(self: Any, projected: MLSTMProjected, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        parts = (projected.queries, projected.keys, projected.values, projected.write, projected.forget)
        q, k, v, write, forget = inputs = [self.of_scanned(m, 2) for m in parts]
        layer, eps = self.layer_idx, self.config.eps
        state: Any = None
        if cache is not None and (memory := cache.get_recurrent_state(layer)) is not None:
            state = memory, cache.get_recurrent_state(layer, 1)
        if state is not None and v.shape[1] == 1:
            return mlstm_step(state, *(m[:, 0] for m in inputs), eps=eps)[:, None]
        y, state = mlstm_scan(q, k, v, write, forget, state, eps=eps, chunk_size=self.config.chunk_size, packing=packing)
        if cache is not None:
            for place, part in enumerate(state):
                cache.update_recurrent_state(part, layer, place)
        return y

    def own_matrices(self: Any, projected: MLSTMProjected, rows: Tensor | None, heads: Sequence[int] | None) -> Tensor:
        q, k, eps = projected.queries, projected.keys, self.config.eps
        return mlstm_matrix(q, k, projected.write, projected.forget, eps=eps, heads=heads, rows=rows)[0]

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        return self.out_proj((self.ogate_act_fn(gate) * self.multihead_norm(y)).to(gate.dtype))
