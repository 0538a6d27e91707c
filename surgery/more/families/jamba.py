"""Jamba (arXiv 2403.19887): Mamba-1 mixers that normalise dt, B and C, attention and experts in some layers."""

from transformers.models.jamba.modeling_jamba import JambaForCausalLM, JambaMambaMixer

from surgery.families.mamba import ChannelFamily
from surgery.hybrids.selective_mixer import NormedSelectiveMixer
from surgery.hybrids.stock_hybrid import stock_hybrid

FAMILY = ChannelFamily(stock_hybrid(JambaForCausalLM, JambaMambaMixer, NormedSelectiveMixer))
