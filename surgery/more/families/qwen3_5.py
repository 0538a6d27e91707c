"""Qwen3.5's language model: Gated DeltaNet, and attention in every fourth layer; each layer with an MLP."""

from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5GatedDeltaNet

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.families.delta_start import SplitDeltaFamily
from surgery.more.hybrids.gated_delta import SplitDeltaMixer

FAMILY = SplitDeltaFamily(stock_hybrid(Qwen3_5ForCausalLM, Qwen3_5GatedDeltaNet, SplitDeltaMixer))
