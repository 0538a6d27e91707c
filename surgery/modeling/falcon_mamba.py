"""Falcon-Mamba (arXiv 2410.05355) with attention at some channels: a Mamba-1 that normalises B, C and dt before the scan. So
its graft normalises queries and keys; the rest is in mamba.py."""

from functools import partial

from transformers import FalconMambaConfig, FalconMambaForCausalLM, FalconMambaModel
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer

from .hybrid import Family, HybridConfig
from .mamba import NormedSelectiveMixer
from .ssm import HybridBackbone, SSMLanguageModel


class FalconMambaHybridMixer(NormedSelectiveMixer, FalconMambaMixer):
    """The mixer of Falcon-Mamba."""


class FalconMambaHybridConfig(HybridConfig, FalconMambaConfig):
    """FalconMambaConfig with `grafts` (graft.py says what an entry holds)."""

    model_type = "falcon_mamba_hybrid"

    grafts: list | None = None


class FalconMambaHybridModel(HybridBackbone, FalconMambaModel):
    """The backbone: all mixers are ours."""

    config_class = FalconMambaHybridConfig
    # static: from Python 3.14 on a partial in a class is a method of it
    mixer_class = staticmethod(partial(FalconMambaHybridMixer, initialize_mixer_weights=False))


class FalconMambaHybridForCausalLM(SSMLanguageModel, FalconMambaForCausalLM):
    """The language model: base (no grafts) and hybrid."""

    config_class = FalconMambaHybridConfig
    backbone_class = FalconMambaHybridModel


FAMILY = Family(FalconMambaForCausalLM, FalconMambaHybridForCausalLM).register(FalconMambaHybridModel)
