"""How grafts in mixers of the gated delta rule start (surgery/more/hybrids/gated_delta.py, kda_mixer.py). One family for each
way their projections are laid out."""

from typing import Any

from torch import Tensor

from surgery.models.quantised import dense
from surgery.more.families.linear_start import LinearFamily


class DeltaFamily(LinearFamily):
    """Whose queries and keys pass a convolution."""

    def shape(self, config: Any) -> tuple[int, int]:
        return config.num_hidden_layers, config.linear_num_value_heads

    def state_size(self, config: Any) -> int:
        return config.linear_key_head_dim

    def filters(self, mixer: Any) -> Tensor:
        taps = mixer.conv1d.weight[: 2 * mixer.key_dim]
        return taps.view(2, mixer.n_groups, mixer.ssm_state_size, *taps.shape[1:])


class FusedDeltaFamily(DeltaFamily):
    """Qwen3-Next's projection, which has the rows of one group after the other."""

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        grouped = dense(mixer.in_proj_qkvz).unflatten(0, (mixer.num_k_heads, -1))
        return grouped[:, : mixer.head_k_dim], grouped[:, mixer.head_k_dim : 2 * mixer.head_k_dim]


class SplitDeltaFamily(DeltaFamily):
    """Qwen3.5's: queries, keys, values."""

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        q, k = dense(mixer.in_proj_qkv)[: 2 * mixer.key_dim].unflatten(0, (2, mixer.num_k_heads, -1))
        return q, k


class SeparateDeltaFamily(DeltaFamily):
    """OLMo-Hybrid's."""

    def rows(self, mixer: Any) -> tuple[Tensor, Tensor]:
        q, k = (dense(projection).unflatten(0, (mixer.n_groups, -1)) for projection in (mixer.q_proj, mixer.k_proj))
        return q, k


class KDAFamily(SeparateDeltaFamily):
    """Kimi Delta Attention's."""

    def shape(self, config: Any) -> tuple[int, int]:
        return config.num_hidden_layers, config.linear_num_heads

    def state_size(self, config: Any) -> int:
        return config.linear_head_dim
