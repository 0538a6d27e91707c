"""Qwen4's language model: Gated DeltaNet, and sparse attention in every fourth layer; experts, several residual streams."""

from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextGatedDeltaNet

from surgery.families.delta_start import SplitDeltaFamily
from surgery.hybrids.gated_delta import SplitDeltaMixer
from surgery.hybrids.stock_hybrid import stock_hybrid

FAMILY = SplitDeltaFamily(stock_hybrid(Qwen4ExpForCausalLM, Qwen4ExpTextGatedDeltaNet, SplitDeltaMixer))
