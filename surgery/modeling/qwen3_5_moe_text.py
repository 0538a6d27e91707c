"""The language model of Qwen3.5 with experts, and with attention at some heads of its Gated DeltaNet layers (delta.py).

Every fourth layer holds attention, and each experts.
"""

from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeTextModel,
)

from .delta import SplitDeltaMixer
from .hybrid import Family, HybridConfig, HybridLanguageModel
from .stock import StockBackbone


class Qwen3_5MoeHybridMixer(SplitDeltaMixer, Qwen3_5MoeGatedDeltaNet):
    """Keys are k, queries q, values v."""


class Qwen3_5MoeHybridConfig(HybridConfig, Qwen3_5MoeTextConfig):
    """Qwen3_5MoeTextConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "qwen3_5_moe_text_hybrid"

    grafts: list | None = None


class Qwen3_5MoeHybridModel(StockBackbone, Qwen3_5MoeTextModel):
    """The backbone: Gated DeltaNet or attention, and experts, in each layer."""

    config_class = Qwen3_5MoeHybridConfig
    mixers = (Qwen3_5MoeGatedDeltaNet, Qwen3_5MoeHybridMixer)


class Qwen3_5MoeHybridForCausalLM(HybridLanguageModel, Qwen3_5MoeForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = Qwen3_5MoeHybridConfig
    backbone_class = Qwen3_5MoeHybridModel


FAMILY = Family(Qwen3_5MoeForCausalLM, Qwen3_5MoeHybridForCausalLM).register(Qwen3_5MoeHybridModel)
