"""Falcon-Mamba (arXiv 2410.05355) with attention at some channels: a Mamba-1 that normalises B, C and dt before the scan. So
its graft normalises queries and keys; the rest is in mamba.py."""

from typing import Any

from torch import nn
from transformers import FalconMambaConfig, FalconMambaForCausalLM, FalconMambaModel
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer

from .hybrid import Family, HybridConfig
from .mamba import NormedSelectiveMixer
from .ssm import HybridBackbone, HybridBlock, SSMLanguageModel


class FalconMambaHybridMixer(NormedSelectiveMixer, FalconMambaMixer):
    """The mixer of Falcon-Mamba."""


class FalconMambaHybridConfig(HybridConfig, FalconMambaConfig):
    """FalconMambaConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "falcon_mamba_hybrid"

    grafts: list | None = None


class FalconMambaHybridModel(HybridBackbone, FalconMambaModel):
    """The backbone: all mixers are ours."""

    config_class = FalconMambaHybridConfig

    def __init__(self, config: FalconMambaHybridConfig):
        super().__init__(config)
        norms: list[Any] = [block.norm for block in self.layers]
        mixers = (FalconMambaHybridMixer(config, layer, initialize_mixer_weights=False) for layer in range(len(norms)))
        self.layers = nn.ModuleList(HybridBlock(config, norm, mixer) for norm, mixer in zip(norms, mixers, strict=True))
        self.put_grafts()
        self.post_init()


class FalconMambaHybridForCausalLM(SSMLanguageModel, FalconMambaForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = FalconMambaHybridConfig
    backbone_class = FalconMambaHybridModel


FAMILY = Family(FalconMambaForCausalLM, FalconMambaHybridForCausalLM, FalconMambaHybridMixer).register(FalconMambaHybridModel)
