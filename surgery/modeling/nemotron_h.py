"""Nemotron-H (arXiv 2504.03624) with attention at some heads of its Mamba-2 layers.

A layer is one mixer: Mamba-2 (mamba2.py), attention, an MLP or experts.
"""

from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM, NemotronHMamba2Mixer, NemotronHModel

from .hybrid import Family, HybridConfig, HybridLanguageModel
from .mamba2 import SSDMixer
from .stock import StockBackbone


class NemotronHHybridMixer(SSDMixer, NemotronHMamba2Mixer):
    """Keys are B, queries C, values x."""


class NemotronHHybridConfig(HybridConfig, NemotronHConfig):
    """NemotronHConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "nemotron_h_hybrid"

    grafts: list | None = None


class NemotronHHybridModel(StockBackbone, NemotronHModel):
    """The backbone: one mixer a layer."""

    config_class = NemotronHHybridConfig
    mixers = (NemotronHMamba2Mixer, NemotronHHybridMixer)


class NemotronHHybridForCausalLM(HybridLanguageModel, NemotronHForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = NemotronHHybridConfig
    backbone_class = NemotronHHybridModel


FAMILY = Family(NemotronHForCausalLM, NemotronHHybridForCausalLM).register(NemotronHHybridModel)
