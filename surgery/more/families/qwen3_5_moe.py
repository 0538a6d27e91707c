"""Qwen3.5's language model with experts: Gated DeltaNet, and attention in every fourth layer."""

from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeGatedDeltaNet

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.families.delta_start import SplitDeltaFamily
from surgery.more.hybrids.gated_delta import SplitDeltaMixer

FAMILY = SplitDeltaFamily(stock_hybrid(Qwen3_5MoeForCausalLM, Qwen3_5MoeGatedDeltaNet, SplitDeltaMixer))
