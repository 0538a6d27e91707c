"""Falcon-Mamba (arXiv 2410.05355): a Mamba-1 that normalises B, C and dt before the scan."""

from transformers import FalconMambaForCausalLM
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer

from surgery.families.mamba import HANDLED, ChannelFamily
from surgery.hybrids.mamba import FalconMambaLanguageModel
from surgery.hybrids.selective_mixer import NormedSelectiveMixer
from surgery.hybrids.stock_hybrid import stock_hybrid

FAMILY = ChannelFamily(
    stock_hybrid(FalconMambaForCausalLM, FalconMambaMixer, NormedSelectiveMixer, FalconMambaLanguageModel),
    HANDLED | {"mixer_rms_eps"},
)
