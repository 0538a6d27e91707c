"""Falcon-H1 (arXiv 2507.22448) with attention at some heads of its Mamba-2 mixers.

Every layer holds a Mamba-2 mixer (mamba2.py) and attention side by side. The mixer multiplies its input by a fixed number, and
what in_proj makes by fixed numbers as well, one for each part; its norm may stand before the gate, or be missing. A graft reads
the multiplied input, and its rows start as the base's times their numbers.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.falcon_h1.configuration_falcon_h1 import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1ForCausalLM, FalconH1Mixer, FalconH1Model

from .hybrid import Family, HybridConfig, HybridLanguageModel
from .mamba2 import SSDMixer
from .stock import StockBackbone


class FalconH1HybridMixer(SSDMixer, FalconH1Mixer):
    """Keys are B, queries C, values x."""

    def enter(self: Any, hidden: Tensor) -> Tensor:
        return hidden * self.ssm_in_multiplier

    def read(self: Any, hidden: Tensor) -> Tensor:
        return self.in_proj(hidden) * self.mup_vector

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        y = y.flatten(-2)
        y = self.norm(y, gate) if self.mamba_rms_norm else y * F.silu(gate)
        return self.out_proj(y.to(gate.dtype))

    def projection_rows(self: Any, make: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().projection_rows(make)
        factors = self.mup_vector[0, 0].to(weight)
        return weight * factors[:, None], None if bias is None else bias * factors


class FalconH1HybridConfig(HybridConfig, FalconH1Config):
    """FalconH1Config with `grafts` (graft.py says what an entry holds)."""

    model_type = "falcon_h1_hybrid"

    grafts: list | None = None


class FalconH1HybridModel(StockBackbone, FalconH1Model):
    """The backbone: a Mamba-2 mixer and attention side by side, and an MLP, in each layer."""

    config_class = FalconH1HybridConfig
    mixers = (FalconH1Mixer, FalconH1HybridMixer)


class FalconH1HybridForCausalLM(HybridLanguageModel, FalconH1ForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = FalconH1HybridConfig
    backbone_class = FalconH1HybridModel


FAMILY = Family(FalconH1ForCausalLM, FalconH1HybridForCausalLM).register(FalconH1HybridModel)
