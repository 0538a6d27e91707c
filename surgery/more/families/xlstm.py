"""xLSTM: mLSTM mixers in all layers, an MLP in each."""

from typing import Any

from torch import Tensor
from transformers.models.xlstm import modeling_xlstm
from transformers.models.xlstm.modeling_xlstm import xLSTMForCausalLM

from surgery.errors import UserError
from surgery.kernels.mlstm import MOST
from surgery.models.quantised import dense
from surgery.more.families.linear_start import LinearFamily


class XLSTMFamily(LinearFamily):
    def check(self, config: Any) -> None:
        if config.gate_soft_cap > MOST:
            raise UserError(
                f"gates of xLSTM are handled up to gate_soft_cap {MOST:g}, and this model has {config.gate_soft_cap:g}"
            )

    def shape(self, config: Any) -> tuple[int, int]:
        return config.num_hidden_layers, config.num_heads

    def state_size(self, config: Any) -> int:
        return self.mixer(config).qk_dim // config.num_heads

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        single = mixer.config.weight_mode == "single"
        rows = (dense(mixer.q), dense(mixer.k)) if single else dense(mixer.qkv_opreact)[: 2 * mixer.qk_dim].chunk(2)
        return self.by_head(mixer, *rows)

    def biases(self, mixer: Any) -> tuple[Tensor, Tensor]:
        single = mixer.config.weight_mode == "single"
        biases = (mixer.q.bias, mixer.k.bias) if single else mixer.qkv_opreact.bias[: 2 * mixer.qk_dim].chunk(2)
        return self.by_head(mixer, *biases)

    @staticmethod
    def by_head(mixer: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q.unflatten(0, (mixer.num_heads, -1)), k.unflatten(0, (mixer.num_heads, -1))


if hasattr(modeling_xlstm, "xLSTMLayer"):  # where the package xlstm is installed, transformers runs its classes instead
    from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

    from surgery.hybrids.stock_hybrid import stock_hybrid
    from surgery.more.hybrids.mlstm_mixer import MLSTMMixer
    from surgery.more.hybrids.xlstm import XLSTMLanguageModel

    FAMILY = XLSTMFamily(stock_hybrid(xLSTMForCausalLM, xLSTMLayer, MLSTMMixer, XLSTMLanguageModel))
