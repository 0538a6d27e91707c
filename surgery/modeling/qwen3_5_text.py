"""The language model of Qwen3.5 with attention at some heads of its Gated DeltaNet layers (delta.py).

Every fourth layer holds attention, and each an MLP.
"""

from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5GatedDeltaNet, Qwen3_5TextModel

from .delta import SplitDeltaMixer
from .hybrid import Family, HybridConfig, HybridLanguageModel
from .stock import StockBackbone


class Qwen3_5HybridMixer(SplitDeltaMixer, Qwen3_5GatedDeltaNet):
    """Keys are k, queries q, values v."""


class Qwen3_5HybridConfig(HybridConfig, Qwen3_5TextConfig):
    """Qwen3_5TextConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "qwen3_5_text_hybrid"

    grafts: list | None = None


class Qwen3_5HybridModel(StockBackbone, Qwen3_5TextModel):
    """The backbone: Gated DeltaNet or attention, and an MLP, in each layer."""

    config_class = Qwen3_5HybridConfig
    mixers = (Qwen3_5GatedDeltaNet, Qwen3_5HybridMixer)


class Qwen3_5HybridForCausalLM(HybridLanguageModel, Qwen3_5ForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = Qwen3_5HybridConfig
    backbone_class = Qwen3_5HybridModel


FAMILY = Family(Qwen3_5ForCausalLM, Qwen3_5HybridForCausalLM).register(Qwen3_5HybridModel)
