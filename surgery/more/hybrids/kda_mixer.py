"""The mixer of Kimi Delta Attention (arXiv 2510.26692): Kimi Linear, Ling 3, GLM 5.3.

It is Gated DeltaNet (gated_delta.py) with a decay for each of the N channels of a head's keys, alpha_t in (0, 1)^N:

    S_t = S_{t-1} diag(alpha_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    y_t = S_t q_t / sqrt(N)

and then o_proj(norm(y) sigmoid(z)). With the recursion written out,

    y_t = sum_{s<=t} (q_t . P_{s,t} k_s) beta_s v_s / sqrt(N),    P_{s,t} = prod_{r=s+1..t} (I - beta_r k_r k_r^T) diag(alpha_r)

A head's query and key are again q and k: what a match is, they say, and the decay says for how long each channel of it is kept.
The *dual graft* forgets nothing, so it is that of Gated DeltaNet, with the same SHARPNESS:

    y_t = sigma sum_{s<=t} softmax_s(sigma tau SHARPNESS q'_t . k'_s + log beta_s) v_s

What is lost is what channels that fade fast were there for: they match the last few tokens, and in the graft any.
docs/ideas/derivations.md has what was measured of it.
"""

from typing import Any

import torch
from torch import Tensor

from surgery.hybrids.parts import at_least_float32
from surgery.more.hybrids.gated_delta import DeltaMixer


class KDAMixer(DeltaMixer):
    """A mixin before a stock mixer of this kind: Kimi Linear's and GLM 5.3's."""

    n_groups = property(lambda self: self.num_heads)  # every head has a query and a key of its own
    ssm_state_size = property(lambda self: self.head_dim)
    head_v_dim = ssm_state_size
    key_dim = property(lambda self: self.qkv_dim)
    value_dim = key_dim
    in_proj = property(lambda self: self.q_proj)
    norm = property(lambda self: self.o_norm)
    out_proj = property(lambda self: self.o_proj)

    def parts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = torch.cat([projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        return qkv, self.output_gate(hidden_states), self.b_proj(hidden_states), self.forget_gate(hidden_states)

    def output_gate(self: Any, hidden_states: Tensor) -> Tensor:
        return self.g_b_proj(self.g_a_proj(hidden_states))

    def log_decay(self: Any, a: Tensor) -> Tensor:
        return at_least_float32(a)


class FullGateKDAMixer(KDAMixer):
    """Ling 3's, whose output gate has one matrix."""

    def output_gate(self: Any, hidden_states: Tensor) -> Tensor:
        return self.g_proj(hidden_states)


class KDALanguageModel:
    """A mixin before StockHybrid."""

    all_mixers = True  # transformers' own function takes two to twenty times as long on a CPU, and twice the memory
