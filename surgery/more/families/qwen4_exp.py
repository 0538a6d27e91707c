"""Qwen4's language model: Gated DeltaNet, and sparse attention in every fourth layer; experts, several residual streams."""

from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextGatedDeltaNet

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.families.delta_start import SplitDeltaFamily
from surgery.more.hybrids.gated_delta import SplitDeltaMixer

FAMILY = SplitDeltaFamily(stock_hybrid(Qwen4ExpForCausalLM, Qwen4ExpTextGatedDeltaNet, SplitDeltaMixer))
