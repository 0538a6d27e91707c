"""Granite 4 with attention at some heads of its Mamba-2 layers.

Most layers hold a Mamba-2 mixer (mamba2.py), the others attention, and each experts or an MLP.
"""

from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridForCausalLM,
    GraniteMoeHybridMambaLayer,
    GraniteMoeHybridModel,
)

from .hybrid import Family, HybridConfig, HybridLanguageModel
from .mamba2 import SSDMixer
from .stock import StockBackbone


class GraniteMoeHybridHybridMixer(SSDMixer, GraniteMoeHybridMambaLayer):
    """Keys are B, queries C, values x."""


class GraniteMoeHybridHybridConfig(HybridConfig, GraniteMoeHybridConfig):
    """GraniteMoeHybridConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "granitemoehybrid_hybrid"

    grafts: list | None = None


class GraniteMoeHybridHybridModel(StockBackbone, GraniteMoeHybridModel):
    """The backbone: a Mamba-2 mixer or attention, and experts or an MLP, in each layer."""

    config_class = GraniteMoeHybridHybridConfig
    mixers = (GraniteMoeHybridMambaLayer, GraniteMoeHybridHybridMixer)


class GraniteMoeHybridHybridForCausalLM(HybridLanguageModel, GraniteMoeHybridForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = GraniteMoeHybridHybridConfig
    backbone_class = GraniteMoeHybridHybridModel


FAMILY = Family(GraniteMoeHybridForCausalLM, GraniteMoeHybridHybridForCausalLM).register(GraniteMoeHybridHybridModel)
