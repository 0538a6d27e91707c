"""GLM 5.3's language model: Kimi Delta Attention, and sparse attention in every fourth layer; experts, several residual
streams."""

from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.families.delta_start import KDAFamily
from surgery.more.hybrids.glm5_next_text import Glm5NextTextForCausalLM
from surgery.more.hybrids.kda_mixer import KDALanguageModel, KDAMixer

FAMILY = KDAFamily(stock_hybrid(Glm5NextTextForCausalLM, Glm5NextTextLinearAttention, KDAMixer, KDALanguageModel))
