"""The mixer of Mamba-2 (mamba2.py has its mathematics) as it stands in transformers' Mamba-2 and in the hybrids that have it
among other layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import apply_mask_to_padding_states

from surgery.hybrids.dual import READ, DualMixer
from surgery.hybrids.parts import fetching, time_step
from surgery.kernels.mixing import ssd_matrix
from surgery.kernels.norm import rms_norm
from surgery.kernels.packing import Packing


class SSDMixer(DualMixer):
    """Stands before a stock mixer of the kind of Mamba2Mixer: three steps (project, mix, finish), the middle one partly
    attention."""

    def project(
        self: Any, hidden_states: Tensor, cache_params: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple:  # fmt: skip
        """u (b, t, d) -> gate z (b, t, h * p), x (b, t, h, p), B and C (b, t, g, n), dt (b, t, h) ready for use, in
        float32 at least, and the grafts' queries and keys (b, t, 2 * pairs * width) or None. Updates the cache's conv state."""
        b, t, _ = hidden_states.shape
        hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)
        gate, xBC, dt = self.read(hidden_states).split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
        xBC, qk = self.convolve(hidden_states, xBC, cache_params, attention_mask, packing)
        state = self.n_groups * self.ssm_state_size
        x, B, C = xBC.split([self.intermediate_size, state, state], dim=-1)
        dt = time_step(dt + self.dt_bias.to(dt.dtype)).clamp(*self.time_step_limit)
        B, C = (m.reshape(b, t, self.n_groups, self.ssm_state_size) for m in (B, C))
        return gate, x.reshape(b, t, self.num_heads, self.head_dim), B, C, dt, qk

    def read(self: Any, hidden_states: Tensor) -> Tensor:
        """What all parts are split from, (b, t, d) -> (b, t, rows of in_proj)."""
        return self.in_proj(hidden_states)

    def scan(
        self: Any, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, heads: list[int], cache_params: Cache | None,
        packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """The SSM's mixing for `heads`, all or those that are not grafted; x (b, t, len(heads), p)."""
        A = -torch.exp(self.A_log.float())
        D: Tensor = self.D
        if len(heads) < self.num_heads:
            others = self.graft.others
            A, D = others.of(A, 0), others.of(D, 0)
        return self.run_ssd(x, dt.to(x.dtype), A, B, C, D, heads, cache_params, packing)  # dt as in transformers

    @fetching("", *READ)
    def matrices(self: Any, hidden_states: Tensor, rows: Tensor | None = None, heads: Sequence[int] | None = None) -> Tensor:
        """The mixing matrices of `heads` (of all, unless given) for one sequence (1, t, d): (heads, rows, t). SSM heads: time
        step included, D not. Grafted heads: their attention (where a blend gate is open, the mixture)."""
        _, _, B, C, dt, qk = self.project(hidden_states)
        matrix = ssd_matrix(dt, -torch.exp(self.A_log.float()), B, C, heads=heads, rows=rows)[0]
        return matrix if self.graft is None or qk is None else self.graft.into(matrix, qk, dt, rows, heads)

    @fetching("norm")  # locate calls it alone
    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        """Gate, norm and output projection: (..., h, p) -> (..., d)."""
        norm = self.norm
        y = rms_norm(y.flatten(-2), norm.weight, norm.variance_epsilon, gate, norm.group_size)
        return self.out_proj(y.to(gate.dtype))  # the activations': a quantised weight has another
