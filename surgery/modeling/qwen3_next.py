"""Qwen3-Next with attention at some heads of its Gated DeltaNet layers (delta.py).

Every fourth layer holds attention, and each experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM, Qwen3NextGatedDeltaNet, Qwen3NextModel

from .delta import GatedDeltaMixer
from .hybrid import Family, HybridConfig, HybridLanguageModel
from .stock import StockBackbone


class Qwen3NextHybridMixer(GatedDeltaMixer, Qwen3NextGatedDeltaNet):
    """in_proj_qkvz has the rows of query, key, values and gates of one group after the other."""

    def parts(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projected = self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(*projected)
        return torch.cat([m.flatten(2) for m in (q, k, v)], dim=-1), z.flatten(2), b, a

    def projected_rows(self: Any, make: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor]:
        grouped = make(self.in_proj_qkvz).unflatten(0, (self.n_groups, -1))
        return grouped[:, : self.head_k_dim], grouped[:, self.head_k_dim : 2 * self.head_k_dim]


class Qwen3NextHybridConfig(HybridConfig, Qwen3NextConfig):
    """Qwen3NextConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "qwen3_next_hybrid"

    grafts: list | None = None


class Qwen3NextHybridModel(StockBackbone, Qwen3NextModel):
    """The backbone: Gated DeltaNet or attention, and experts, in each layer."""

    config_class = Qwen3NextHybridConfig
    mixers = (Qwen3NextGatedDeltaNet, Qwen3NextHybridMixer)


class Qwen3NextHybridForCausalLM(HybridLanguageModel, Qwen3NextForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = Qwen3NextHybridConfig
    backbone_class = Qwen3NextHybridModel


FAMILY = Family(Qwen3NextForCausalLM, Qwen3NextHybridForCausalLM).register(Qwen3NextHybridModel)
