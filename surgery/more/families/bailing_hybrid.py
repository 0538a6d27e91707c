"""Ling 3: Kimi Delta Attention, and latent attention in every sixth layer; most layers with experts."""

from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention, BailingHybridForCausalLM

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.families.delta_start import KDAFamily
from surgery.more.hybrids.kda_mixer import FullGateKDAMixer, KDALanguageModel

FAMILY = KDAFamily(stock_hybrid(BailingHybridForCausalLM, BailingHybridDeltaAttention, FullGateKDAMixer, KDALanguageModel))
