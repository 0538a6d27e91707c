"""MiniMax: Lightning attention in most layers, attention in the others, experts in each."""

from typing import Any

from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxForCausalLM, MiniMaxLightningAttention

from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.models.quantised import dense
from surgery.more.families.linear_start import LinearFamily
from surgery.more.hybrids.lightning_mixer import LightningLanguageModel, LightningMixer


class MiniMaxFamily(LinearFamily):
    time_step = False

    def shape(self, config: Any) -> tuple[int, int]:
        return config.num_hidden_layers, config.num_attention_heads

    def state_size(self, config: Any) -> int:
        return self.mixer(config).head_dim

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        q, k, _ = dense(mixer.qkv_proj).unflatten(0, (mixer.num_heads, 3, -1)).unbind(1)
        return q, k


FAMILY = MiniMaxFamily(stock_hybrid(MiniMaxForCausalLM, MiniMaxLightningAttention, LightningMixer, LightningLanguageModel))
