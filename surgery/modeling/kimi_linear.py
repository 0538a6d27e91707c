"""Kimi Linear (arXiv 2510.26692) with attention at some heads of its Kimi Delta Attention (delta.py).

Every fourth layer holds attention without positions, and most layers hold experts.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearDeltaAttention,
    KimiLinearForCausalLM,
    KimiLinearModel,
)

from .delta import DeltaMixer
from .hybrid import Family, HybridConfig, HybridLanguageModel
from .reference import at_least_float32
from .stock import StockBackbone


class KimiLinearHybridMixer(DeltaMixer, KimiLinearDeltaAttention):
    """Every head has a query and a key of its own, and each channel of its keys a decay. The decay says for how long a channel
    is kept; a graft forgets nothing, so what is lost are channels that match the last few tokens alone."""

    n_groups = property(lambda self: self.num_heads)
    ssm_state_size = head_v_dim = property(lambda self: self.head_dim)
    key_dim = value_dim = property(lambda self: self.qkv_dim)
    norm = property(lambda self: self.o_norm)
    out_proj = property(lambda self: self.o_proj)

    def parts(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = torch.cat([each(hidden) for each in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        return qkv, self.g_b_proj(self.g_a_proj(hidden)), self.b_proj(hidden), self.forget_gate(hidden)

    def log_decay(self, a: Tensor) -> Tensor:
        return at_least_float32(a)


class KimiLinearHybridConfig(HybridConfig, KimiLinearConfig):
    """KimiLinearConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "kimi_linear_hybrid"

    grafts: list | None = None


class KimiLinearHybridModel(StockBackbone, KimiLinearModel):
    """The backbone: Kimi Delta Attention or attention, and experts or an MLP, in each layer."""

    config_class = KimiLinearHybridConfig
    mixers = (KimiLinearDeltaAttention, KimiLinearHybridMixer)


class KimiLinearHybridForCausalLM(HybridLanguageModel, KimiLinearForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = KimiLinearHybridConfig
    backbone_class = KimiLinearHybridModel


FAMILY = Family(KimiLinearForCausalLM, KimiLinearHybridForCausalLM).register(KimiLinearHybridModel)
