"""Zamba2 (arXiv 2411.15242): Mamba-2 mixers, some of which read a block of attention that they share."""

from transformers.models.zamba2.modeling_zamba2 import Zamba2ForCausalLM, Zamba2MambaMixer

from surgery.families.mamba2 import Mamba2Family
from surgery.hybrids.ssd_mixer import SSDMixer
from surgery.hybrids.stock_hybrid import stock_hybrid

FAMILY = Mamba2Family(stock_hybrid(Zamba2ForCausalLM, Zamba2MambaMixer, SSDMixer))
