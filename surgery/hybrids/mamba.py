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

An entry of a hybrid configuration's `grafts` is

{"kind": "head", "layer": int, "heads": [int, ...], "pairs": [[int, ...], ...], "signs": [1 or -1, ...], "width": int,
 "time_step": bool, "blend": float or None}

heads: channels, sorted; pairs: for each query-key pair the places in `heads` that it serves; signs: sigma of each pair; the
rest as for Mamba-2.
"""

from transformers import FalconMambaModel, MambaModel
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaBlock, FalconMambaRMSNorm
from transformers.models.mamba.modeling_mamba import MambaBlock, MambaRMSNorm

from surgery.hybrids.parts import RMSNorm
from surgery.hybrids.ssm_model import HybridBackbone, HybridBlock, HybridLanguageModel


class MambaBackbone(HybridBackbone, MambaModel):
    """What transformers' becomes."""


class FalconMambaBackbone(HybridBackbone, FalconMambaModel):
    """What transformers' becomes."""


class MambaLanguageModel(HybridLanguageModel):
    exchanged = {MambaModel: MambaBackbone, MambaBlock: HybridBlock, MambaRMSNorm: RMSNorm}


class FalconMambaLanguageModel(HybridLanguageModel):
    exchanged = {FalconMambaModel: FalconMambaBackbone, FalconMambaBlock: HybridBlock, FalconMambaRMSNorm: RMSNorm}
