"""Jamba (arXiv 2403.19887) with attention at some channels of its Mamba-1 layers.

Most layers hold a Mamba-1 mixer that normalises dt, B and C (mamba.py), the others attention, and each experts or an MLP.
"""

from torch import Tensor
from transformers.models.jamba.configuration_jamba import JambaConfig
from transformers.models.jamba.modeling_jamba import JambaForCausalLM, JambaMambaMixer, JambaModel

from .hybrid import Family, HybridConfig, HybridLanguageModel
from .mamba import NormedSelectiveMixer
from .stock import StockBackbone


class JambaHybridMixer(NormedSelectiveMixer, JambaMambaMixer):
    """Keys are B, queries C, values x; a head is a channel."""

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        return super().finish(y, gate).to(gate.dtype)  # its residual stream is never in float32


class JambaHybridConfig(HybridConfig, JambaConfig):
    """JambaConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "jamba_hybrid"

    grafts: list | None = None


class JambaHybridModel(StockBackbone, JambaModel):
    """The backbone: a Mamba-1 mixer or attention, and experts or an MLP, in each layer."""

    config_class = JambaHybridConfig
    mixers = (JambaMambaMixer, JambaHybridMixer)


class JambaHybridForCausalLM(HybridLanguageModel, JambaForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = JambaHybridConfig
    backbone_class = JambaHybridModel


FAMILY = Family(JambaForCausalLM, JambaHybridForCausalLM).register(JambaHybridModel)
