"""Kimi Linear: Kimi Delta Attention, and attention without positions in every fourth layer; most layers with experts."""

from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention, KimiLinearForCausalLM

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.families.delta_start import KDAFamily
from surgery.more.hybrids.kda_mixer import KDALanguageModel, KDAMixer

FAMILY = KDAFamily(stock_hybrid(KimiLinearForCausalLM, KimiLinearDeltaAttention, KDAMixer, KDALanguageModel))
