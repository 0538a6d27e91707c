"""Where mixers without a convolution keep their states in a cache, and how a block hands them the cache."""

from typing import Any, NamedTuple

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer


class StateLayer(LinearAttentionLayer):
    """A layer of a cache for states alone. transformers' own says that it holds something once it holds a convolution's."""

    is_compileable = False  # by itself: a cache with keys of grafts cannot be compiled

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.device: Any = recurrent_states.device
        self.has_previous_state[state_idx] = True
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)


class Handed(NamedTuple):
    """What a mixer is to know, for a block that hands on one thing alone. mask (b, t): which of these tokens exist; None for
    all of them."""

    cache: Cache | None
    mask: Tensor | None
