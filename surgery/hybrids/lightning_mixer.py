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
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache, apply_mask_to_padding_states

from surgery.hybrids.dual import READ, DualGraft, DualMixer
from surgery.hybrids.parts import fetching
from surgery.hybrids.states import StateLayer
from surgery.kernels.lightning import lightning_scan
from surgery.kernels.mixing import ssd_matrix
from surgery.kernels.packing import Packing
from surgery.kernels.ssd import ssd_scan, ssd_step

SIZES = 1  # which state of a layer is that of the grafted heads' r


class LightningGraft(DualGraft):
    """dt holds r. There is no time step in the scores: nothing is written with more strength than anything else."""

    def weighed(self, attention: Tensor, dt: Tensor, rows: Tensor | None) -> Tensor:
        sizes = dt if rows is None else dt[rows]
        return attention * sizes.T[..., None].to(attention.dtype)


class LightningMixer(DualMixer):
    """Stands before MiniMax's mixer.

    Among what DualMixer passes from step to step, x is v, B is k, C is q, and dt (b, t, h) holds r, of the grafted heads.
    """

    graft_class = LightningGraft
    returns_pair = True
    D = None

    num_heads = property(lambda self: self.num_attention_heads)
    n_groups = num_heads  # every head has a query and a key of its own
    ssm_state_size = property(lambda self: self.head_dim)
    in_proj = property(lambda self: self.qkv_proj)

    def project(
        self: Any, hidden_states: Tensor, cache_params: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple:  # fmt: skip
        """u (b, t, d) -> what stands before gate g (b, t, h * p), v (b, t, h, p), k and q (b, t, h, p), r (b, t, h), and the
        grafts' queries and keys (b, t, 2 * pairs * width) or None. Updates the cache's state of r."""
        qkv = apply_mask_to_padding_states(self.act_fn(self.qkv_proj(hidden_states)), attention_mask)
        q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).split(self.head_dim, dim=-1)
        sizes, qk = torch.zeros_like(q[..., 0]), None
        if self.graft is not None:
            qk = self.graft.project(hidden_states)
            qk = qk if self.graft.direct else self.act_fn(qk)
            sizes = self.sizes(q, k, cache_params, packing)
        return self.output_gate(hidden_states), v, k, q, sizes, qk

    @property
    def slope(self: Any) -> Tensor:
        """a, (h,)."""
        return self.slope_rate.flatten()

    def sizes(self: Any, q: Tensor, k: Tensor, cache_params: Cache | None, packing: Packing | None) -> Tensor:
        """r of the grafted heads, zero of the others, (b, t, h)."""
        grafted, layer = self.graft.grafted, self.layer_idx
        q, k, A = grafted.of(q, 2), grafted.of(k, 2), -grafted.of(self.slope, 0)
        ones = torch.ones_like(k[..., :1])
        state = None if cache_params is None else cache_params.get_recurrent_state(layer, SIZES)
        if state is not None and q.shape[1] == 1:
            r = ssd_step(state, ones[:, 0], ones[:, 0, :, 0], A, k[:, 0], q[:, 0])[:, None]
        else:
            r, state = ssd_scan(ones, ones[..., 0], A, k, q, None, state, packing=packing)
            if cache_params is not None:
                cache_params.update_recurrent_state(state, layer, SIZES)
        all_heads = r.new_zeros(*r.shape[:2], self.num_heads)
        return all_heads.index_add(2, grafted.on(r, torch.long), r[..., 0].abs())

    def scan(
        self: Any, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, heads: list[int], cache_params: Cache | None,
        packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """The sums of `heads`, all or those that are not grafted: (b, t, heads, p). x (b, t, len(heads), p), B and C of all
        heads."""
        slope = self.slope
        if len(heads) < self.num_heads:
            others = self.graft.others
            B, C, slope = others.of(B, 2), others.of(C, 2), others.of(slope, 0)
        state = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            ones = torch.ones_like(x[:, 0, :, 0])
            return ssd_step(state, x[:, 0], ones, -slope, B[:, 0], C[:, 0])[:, None]
        y, state = lightning_scan(C, B, x, slope, state, block_size=self.block_size, packing=packing)
        if cache_params is not None:
            cache_params.update_recurrent_state(state, self.layer_idx)
        return y

    def attend(
        self: Any, x: Tensor, dt: Tensor, qk: Tensor, cache_params: Cache | None = None,
        causal_mask: Tensor | Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """The grafts' mixing: (b, t, grafted heads, p)."""
        y = super().attend(x, dt, qk, cache_params, causal_mask)
        return y * self.graft.grafted.of(dt, -1)[..., None].to(y.dtype)

    @fetching("", *READ)
    def matrices(self: Any, hidden_states: Tensor, rows: Tensor | None = None, heads: Sequence[int] | None = None) -> Tensor:
        """The mixing matrices of `heads` (of all, unless given) for one sequence (1, t, d): (heads, rows, t), such that y is
        M v. Grafted heads: their attention times r (where a blend gate is open, the mixture)."""
        _, _, k, q, dt, qk = self.project(hidden_states)
        matrix = ssd_matrix(torch.ones_like(dt), -self.slope, k, q, heads=heads, rows=rows)[0]
        return matrix if self.graft is None or qk is None else self.graft.into(matrix, qk, dt, rows, heads)

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        """Norm, gate and output projection: (..., h, p) -> (..., d)."""
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
    """Stands before StockHybrid."""

    def new_cache(self: Any) -> Cache:
        """For states, and keys of the model's own attention."""
        return LightningCache(self.config)
