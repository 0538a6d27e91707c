"""Qwen3-Next: Gated DeltaNet, and attention in every fourth layer; each layer with experts."""

from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM, Qwen3NextGatedDeltaNet

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.families.delta_start import FusedDeltaFamily
from surgery.more.hybrids.gated_delta import FusedDeltaMixer

FAMILY = FusedDeltaFamily(stock_hybrid(Qwen3NextForCausalLM, Qwen3NextGatedDeltaNet, FusedDeltaMixer))
