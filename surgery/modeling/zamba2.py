"""Zamba2 (arXiv 2411.15242) with attention at some heads of its Mamba-2 mixers (mamba2.py).

Every layer holds such a mixer. In some layers it reads what a block of attention has made, which these layers share.
"""

from transformers.models.zamba2.configuration_zamba2 import Zamba2Config
from transformers.models.zamba2.modeling_zamba2 import Zamba2ForCausalLM, Zamba2MambaMixer, Zamba2Model

from .hybrid import Family, HybridConfig, HybridLanguageModel
from .mamba2 import SSDMixer
from .stock import StockBackbone


class Zamba2HybridMixer(SSDMixer, Zamba2MambaMixer):
    """Keys are B, queries C, values x."""


class Zamba2HybridConfig(HybridConfig, Zamba2Config):
    """Zamba2Config with `grafts` (graft.py says what an entry holds)."""

    model_type = "zamba2_hybrid"

    grafts: list | None = None


class Zamba2HybridModel(StockBackbone, Zamba2Model):
    """The backbone: a Mamba-2 mixer in each layer, behind a shared block in some."""

    config_class = Zamba2HybridConfig
    mixers = (Zamba2MambaMixer, Zamba2HybridMixer)


class Zamba2HybridForCausalLM(HybridLanguageModel, Zamba2ForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = Zamba2HybridConfig
    backbone_class = Zamba2HybridModel


FAMILY = Family(Zamba2ForCausalLM, Zamba2HybridForCausalLM).register(Zamba2HybridModel)
