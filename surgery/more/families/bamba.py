"""Bamba: Mamba-2 mixers in most layers, attention in the others, an MLP in each."""

from transformers.models.bamba.modeling_bamba import BambaForCausalLM, BambaMixer

from surgery.families.mamba2 import Mamba2Family
from surgery.hybrids.ssd_mixer import SSDMixer
from surgery.hybrids.stock_hybrid import stock_hybrid

FAMILY = Mamba2Family(stock_hybrid(BambaForCausalLM, BambaMixer, SSDMixer))
