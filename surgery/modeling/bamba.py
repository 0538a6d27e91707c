"""Bamba with attention at some heads of its Mamba-2 layers.

Most layers hold a Mamba-2 mixer (mamba2.py), the others attention, and each an MLP.
"""

from transformers.models.bamba.configuration_bamba import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaForCausalLM, BambaMixer, BambaModel

from .hybrid import Family, HybridConfig, HybridLanguageModel
from .mamba2 import SSDMixer
from .stock import StockBackbone


class BambaHybridMixer(SSDMixer, BambaMixer):
    """Keys are B, queries C, values x."""


class BambaHybridConfig(HybridConfig, BambaConfig):
    """BambaConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "bamba_hybrid"

    grafts: list | None = None


class BambaHybridModel(StockBackbone, BambaModel):
    """The backbone: a Mamba-2 mixer or attention, and an MLP, in each layer."""

    config_class = BambaHybridConfig
    mixers = (BambaMixer, BambaHybridMixer)


class BambaHybridForCausalLM(HybridLanguageModel, BambaForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = BambaHybridConfig
    backbone_class = BambaHybridModel


FAMILY = Family(BambaForCausalLM, BambaHybridForCausalLM).register(BambaHybridModel)
