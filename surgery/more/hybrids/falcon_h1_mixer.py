"""Falcon-H1's mixer: Mamba-2's with fixed multipliers before and after its projection, and a norm that may stand before the
gate, or be missing."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from surgery.hybrids.dual import SSDProjected
from surgery.hybrids.ssd_mixer import SSDMixer


class FalconH1SSDMixer(SSDMixer):
    ssm_in_multiplier: float
    mup_vector: Tensor
    mamba_rms_norm: bool

    def project(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> SSDProjected:
        return super().project(hidden_states * self.ssm_in_multiplier, *args, **kwargs)

    def read(self, hidden_states: Tensor) -> Tensor:
        return super().read(hidden_states) * self.mup_vector

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        y = y.flatten(-2)
        y = self.norm(y, gate) if self.mamba_rms_norm else y * F.silu(gate)
        return self.out_proj(y.to(gate.dtype))
