"""OLMo-Hybrid: Gated DeltaNet, and attention in every fourth layer; each layer with an MLP."""

from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridForCausalLM, OlmoHybridGatedDeltaNet

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.families.delta_start import SeparateDeltaFamily
from surgery.more.hybrids.gated_delta import SeparateDeltaMixer

FAMILY = SeparateDeltaFamily(stock_hybrid(OlmoHybridForCausalLM, OlmoHybridGatedDeltaNet, SeparateDeltaMixer))
