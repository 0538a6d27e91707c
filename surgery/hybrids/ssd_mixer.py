"""The mixer of Mamba-2 (mamba2.py has its mathematics) as it is in transformers' Mamba-2 and in the hybrids that have it
among other layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import apply_mask_to_padding_states

from surgery.hybrids.dual import DualMixer, SSDProjected
from surgery.hybrids.parts import fetching, time_step
from surgery.kernels.mixing import ssd_matrix
from surgery.kernels.norm import rms_norm
from surgery.kernels.packing import Packing


class SSDMixer(DualMixer):
    """A mixin before a stock mixer of the kind of Mamba2Mixer. Keys are B, queries C, values x."""

    def project(
        self: Any, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> SSDProjected:  # fmt: skip
        b, t, _ = hidden_states.shape
        hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)
        gate, xBC, dt = self.read(hidden_states).split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
        xBC, qk = self.convolve(hidden_states, xBC, cache, attention_mask, packing)
        state = self.n_groups * self.ssm_state_size
        x, B, C = xBC.split([self.intermediate_size, state, state], dim=-1)
        dt = time_step(dt + self.dt_bias.to(dt.dtype)).clamp(*self.time_step_limit)
        B, C = (m.reshape(b, t, self.n_groups, self.ssm_state_size) for m in (B, C))
        return SSDProjected(x.reshape(b, t, self.num_heads, self.head_dim), B, C, gate, qk, dt)

    def read(self: Any, hidden_states: Tensor) -> Tensor:
        """What all parts are split from, (b, t, d) -> (b, t, rows of in_proj)."""
        return self.in_proj(hidden_states)

    def scan(self: Any, projected: SSDProjected, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        A = -torch.exp(self.A_log.float())
        A, D = self.of_scanned(A, 0), self.of_scanned(self.D, 0)
        x, dt = self.of_scanned(projected.values, 2), self.of_scanned(projected.dt, -1)
        dt = dt.to(x.dtype)  # as in transformers
        return self.run_ssd(x, dt, A, projected.keys, projected.queries, D, cache, packing)

    def own_matrices(self: Any, projected: SSDProjected, rows: Tensor | None, heads: Sequence[int] | None) -> Tensor:
        """The time step included, D not."""
        A = -torch.exp(self.A_log.float())
        return ssd_matrix(projected.dt, A, projected.keys, projected.queries, heads=heads, rows=rows)[0]

    @fetching("norm")  # locate calls it alone
    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        norm = self.norm
        y = rms_norm(y.flatten(-2), norm.weight, norm.variance_epsilon, gate, norm.group_size)
        return self.out_proj(y.to(gate.dtype))  # the activations': a quantised weight has another
