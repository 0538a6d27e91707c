"""OLMo-Hybrid with attention at some heads of its Gated DeltaNet layers (delta.py).

Every fourth layer holds attention, and each an MLP.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridForCausalLM, OlmoHybridGatedDeltaNet, OlmoHybridModel

from .delta import GatedDeltaMixer
from .hybrid import Family, HybridConfig, HybridLanguageModel
from .stock import StockBackbone


class OlmoHybridHybridMixer(GatedDeltaMixer, OlmoHybridGatedDeltaNet):
    """With a projection for everything. beta may be up to 2, so that the state may forget more than it held."""

    norm = property(lambda self: self.o_norm)
    out_proj = property(lambda self: self.o_proj)
    most_rate = property(lambda self: 2.0 if self.allow_neg_eigval else 1.0)

    def parts(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = torch.cat([each(hidden) for each in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        return qkv, self.g_proj(hidden), self.b_proj(hidden), self.a_proj(hidden)


class OlmoHybridHybridConfig(HybridConfig, OlmoHybridConfig):
    """OlmoHybridConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "olmo_hybrid_hybrid"

    grafts: list | None = None


class OlmoHybridHybridModel(StockBackbone, OlmoHybridModel):
    """The backbone: Gated DeltaNet or attention, and an MLP, in each layer."""

    config_class = OlmoHybridHybridConfig
    mixers = (OlmoHybridGatedDeltaNet, OlmoHybridHybridMixer)


class OlmoHybridHybridForCausalLM(HybridLanguageModel, OlmoHybridForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = OlmoHybridHybridConfig
    backbone_class = OlmoHybridHybridModel


FAMILY = Family(OlmoHybridForCausalLM, OlmoHybridHybridForCausalLM).register(OlmoHybridHybridModel)
