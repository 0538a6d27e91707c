"""Bamba: Mamba-2 mixers in most layers, attention in the others, an MLP in each."""

from transformers.models.bamba.modeling_bamba import BambaForCausalLM, BambaMixer

from surgery.families.stock import StockSSDFamily
from surgery.hybrids.ssd_mixer import SSDMixer
from surgery.hybrids.stock_hybrid import stock_hybrid

FAMILY = StockSSDFamily(stock_hybrid(BambaForCausalLM, BambaMixer, SSDMixer))
