"""The mixer of MiniMax, Lightning attention (arXiv 2501.08313).

For each token t a layer projects its input to a query q, a key k and a value v, all behind SiLU, and to an output gate g. A
head keeps a state S (P x N), which fades at a rate that is fixed:

    S_t = exp(-a) S_{t-1} + v_t k_t^T,    y_t = S_t q_t

and then out_proj(sigmoid(g) norm(y)), with one norm over the channels of all heads. With the recursion written out,

    y_t = sum_{s<=t} w_ts v_s,    w_ts = exp(-a (t - s)) (q_t . k_s)

This is linear attention with query q, key k, value v and nothing in the place of Mamba-2's time step. And it is a sum, whose
size is compared with that of the other heads' by the norm that they share: how sure a head is, it says by its size, and an
average would be lost beside the others, or drown them. So the *dual graft* of a head keeps v, norm, gate and out_proj, replaces
the weights by those of softmax, and keeps the sum of them, which the base's own scan of the value 1 gives:

    y_t = sigma r_t sum_{s<=t} softmax_s(sigma tau q'_t . k'_s) v_s,    r_t = |sum_{s<=t} w_ts|

q' and k' come from the graft's own projection, which starts as a copy of the base's rows; SiLU follows, as in the base. There
is no convolution: what is said of it in mlstm_mixer.py holds here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache, apply_mask_to_padding_states

from surgery.hybrids.dual import DualMixer, DualProjected
from surgery.hybrids.states import StateLayer
from surgery.kernels.lightning import lightning_scan
from surgery.kernels.mixing import ssd_matrix
from surgery.kernels.packing import Packing
from surgery.kernels.ssd import ssd_scan, ssd_step

SIZES = 1  # which state of a layer is that of the grafted heads' r


@dataclass(eq=False)
class LightningProjected(DualProjected):
    """sizes (b, t, grafted heads): r; None without a graft."""

    sizes: Tensor | None


class LightningMixer(DualMixer):
    """A mixin before MiniMax's mixer. Nothing is written with more strength than anything else: no graft has a time step."""

    returns_pair = True

    num_heads = property(lambda self: self.num_attention_heads)
    n_groups = num_heads  # every head has a query and a key of its own
    ssm_state_size = property(lambda self: self.head_dim)
    in_proj = property(lambda self: self.qkv_proj)

    def project(
        self: Any, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> LightningProjected:  # fmt: skip
        """Updates the cache's state of r."""
        qkv = apply_mask_to_padding_states(self.act_fn(self.qkv_proj(hidden_states)), attention_mask)
        q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).split(self.head_dim, dim=-1)
        gate, qk, sizes = self.output_gate(hidden_states), None, None
        if self.graft is not None:
            qk, sizes = self.graft.project(hidden_states), self.sizes(q, k, cache, packing)
        return LightningProjected(v, k, q, gate, qk, sizes)

    def prepare(self: Any, qk: Tensor) -> Tensor:
        return self.act_fn(qk)

    def weights(self: Any, projected: LightningProjected) -> Tensor | None:
        return projected.sizes

    @property
    def slope(self: Any) -> Tensor:
        """a, (h,)."""
        return self.slope_rate.flatten()

    def sizes(self: Any, q: Tensor, k: Tensor, cache: Cache | None, packing: Packing | None) -> Tensor:
        """r of the grafted heads, (b, t, grafted heads)."""
        grafted, layer = self.graft.grafted, self.layer_idx
        q, k, A = grafted.of(q, 2), grafted.of(k, 2), -grafted.of(self.slope, 0)
        ones = torch.ones_like(k[..., :1])
        state = None if cache is None else cache.get_recurrent_state(layer, SIZES)
        if state is not None and q.shape[1] == 1:
            r = ssd_step(state, ones[:, 0], ones[:, 0, :, 0], A, k[:, 0], q[:, 0])[:, None]
        else:
            r, state = ssd_scan(ones, ones[..., 0], A, k, q, None, state, packing=packing)
            if cache is not None:
                cache.update_recurrent_state(state, layer, SIZES)
        return r[..., 0].abs()

    def scan(self: Any, projected: LightningProjected, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        q, k, v = (self.of_scanned(m, 2) for m in (projected.queries, projected.keys, projected.values))
        slope = self.of_scanned(self.slope, 0)
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and v.shape[1] == 1:
            ones = torch.ones_like(v[:, 0, :, 0])
            return ssd_step(state, v[:, 0], ones, -slope, k[:, 0], q[:, 0])[:, None]
        y, state = lightning_scan(q, k, v, slope, state, block_size=self.block_size, packing=packing)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        return y

    def own_matrices(self: Any, projected: LightningProjected, rows: Tensor | None, heads: Sequence[int] | None) -> Tensor:
        ones = torch.ones_like(projected.values[..., 0])
        return ssd_matrix(ones, -self.slope, projected.keys, projected.queries, heads=heads, rows=rows)[0]

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        return self.out_proj((torch.sigmoid(gate) * self.norm(y.flatten(-2))).to(gate.dtype))


class LightningCache(MiniMaxCache):
    """MiniMax's own keeps states in a list beside the layers of keys, which is not reordered for beams and cannot be read
    before it is filled as far as there are layers. Here states are in layers like all others."""

    def __init__(self, config: Any):
        DynamicCache.__init__(self, config=config)
        self.layers = [StateLayer(2) if isinstance(layer, LinearAttentionLayer) else layer for layer in self.layers]

    def __len__(self) -> int:
        return len(self.layers)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """S as transformers has it, (b, h, n, p), or None."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        DynamicCache.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        DynamicCache.batch_select_indices(self, indices)


class LightningLanguageModel:
    """A mixin before StockHybrid."""

    def new_cache(self: Any) -> Cache:
        """For states, and keys of the model's own attention."""
        return LightningCache(self.config)
