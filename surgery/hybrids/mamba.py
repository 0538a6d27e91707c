"""The hybrids of Mamba-1 and Falcon-Mamba: some channels are attention.

A head of Mamba-1 is a channel (notation of arXiv 2312.00752; c: channel, n: state, D_{s,c}: its time step):

    y_{t,c} = sum_{s<=t} [ sum_n C_{t,n} exp(A_{c,n} (D_{s+1,c} + ... + D_{t,c})) B_{s,n} ] D_{s,c} x_{s,c} + D_c x_{t,c}

The bracket without its decay, C_t . B_s, is the same for all channels: the dual graft of a set of channels is one attention
with query C, key B and the channels' x as its value,

    y_{t,c} = sigma sum_{s<=t} softmax_s(sigma tau C'_t . B'_s + log D_{s,c}) x_{s,c} + D_c x_{t,c}

where only log D differs from channel to channel. It leaves the scores by

    sum_s e^{q.k_s} D_{s,c} x_{s,c} / sum_s e^{q.k_s} D_{s,c},

numerator and denominator being the same attention over D x and over D: a value twice as wide instead of scores for every
channel. Channels with the same sigma and tau at the start share a query-key pair; there are as many pairs as there are such
sets. B and C are made from x by x_proj; C' and B' come from the graft's own copies of those rows. Falcon-Mamba normalises dt, B
and C, and so does its graft.
"""

from typing import Any

from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    FalconMambaModel,
    MambaConfig,
    MambaForCausalLM,
    MambaModel,
)
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer

from surgery.hybrids.common import HybridBackbone, HybridCausalLM, describe_layers
from surgery.hybrids.selective_mixer import NormedSelectiveMixer, SelectiveMixer
from surgery.hybrids.spliced import register


class MambaHybridConfig(MambaConfig):
    """A MambaConfig with `grafts`: a list with one entry per grafted layer,

    {"layer": int, "heads": [int, ...], "pairs": [[int, ...], ...], "signs": [1 or -1, ...], "width": int, "time_step": bool,
     "blend": float or None}

    heads: channels, sorted; pairs: for each query-key pair the places in `heads` that it serves; signs: sigma of each pair;
    the rest as for Mamba-2.
    """

    model_type = "mamba_hybrid"

    grafts: list | None = None
    layer_types: list | None = None  # the parent's is a read-only property

    def __post_init__(self, **kwargs: Any) -> None:
        describe_layers(self, "mamba", "MambaHybrid")
        super().__post_init__(**kwargs)


class FalconMambaHybridConfig(FalconMambaConfig):
    """As MambaHybridConfig."""

    model_type = "falcon_mamba_hybrid"

    grafts: list | None = None
    layer_types: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        describe_layers(self, "mamba", "FalconMambaHybrid")
        super().__post_init__(**kwargs)


class MambaHybridMixer(SelectiveMixer, MambaMixer):
    def __init__(self, config: MambaHybridConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.take_grafts(config)


class FalconMambaHybridMixer(NormedSelectiveMixer, FalconMambaMixer):
    def __init__(self, config: FalconMambaHybridConfig, layer_idx: int):
        super().__init__(config, layer_idx, initialize_mixer_weights=False)  # as the stock block says; its own way fails
        self.take_grafts(config)


class MambaHybridModel(HybridBackbone, MambaModel):
    config_class = MambaHybridConfig
    mixer_class = MambaHybridMixer


class FalconMambaHybridModel(HybridBackbone, FalconMambaModel):
    config_class = FalconMambaHybridConfig
    mixer_class = FalconMambaHybridMixer


class MambaHybridForCausalLM(HybridCausalLM, MambaForCausalLM):
    config_class = MambaHybridConfig
    backbone_class = MambaHybridModel


class FalconMambaHybridForCausalLM(HybridCausalLM, FalconMambaForCausalLM):
    config_class = FalconMambaHybridConfig
    backbone_class = FalconMambaHybridModel


register(MambaHybridConfig, MambaHybridModel, MambaHybridForCausalLM)
register(FalconMambaHybridConfig, FalconMambaHybridModel, FalconMambaHybridForCausalLM)
