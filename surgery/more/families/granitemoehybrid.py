"""Granite 4: Mamba-2 mixers in most layers, attention in the others, experts or an MLP in each."""

from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridForCausalLM,
    GraniteMoeHybridMambaLayer,
)

from surgery.families.mamba2 import Mamba2Family
from surgery.hybrids.ssd_mixer import SSDMixer
from surgery.hybrids.stock_hybrid import stock_hybrid

FAMILY = Mamba2Family(stock_hybrid(GraniteMoeHybridForCausalLM, GraniteMoeHybridMambaLayer, SSDMixer))
