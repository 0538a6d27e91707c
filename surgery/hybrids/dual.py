"""The grafts of mixers whose heads have a matrix each (Mamba-2 and all later ones): queries and keys made as the base's are.

What they compute is in mamba2.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import apply_mask_to_padding_states

from surgery.hybrids.constants import Index
from surgery.hybrids.mixer import SMALLEST, Graft, GraftedMixer, Projected
from surgery.hybrids.parts import convolved, seen_keys
from surgery.kernels.attention import graft_attention
from surgery.kernels.conv import SILU
from surgery.kernels.functions import own_precision
from surgery.kernels.mixing import attention_matrix
from surgery.kernels.native import learns
from surgery.kernels.packing import Packing
from surgery.kernels.ssd import ssd_scan, ssd_step


@dataclass(eq=False)
class DualProjected(Projected):
    """qk (b, t, 2 * pairs * width): the graft's queries and keys as its projections and its convolution, if it has one, give
    them; None without a graft."""

    qk: Tensor | None


@dataclass(eq=False)
class SSDProjected(DualProjected):
    """dt (b, t, h): time steps ready for use, in float32 at least."""

    dt: Tensor


class DualGraft(Graft):
    """Queries and keys for the grafted heads of one layer. Its projections are named as in a Transformer, for PEFT."""

    def __init__(self, mixer: Any, spec: dict):
        super().__init__(spec, len(spec["heads"]), mixer.num_heads)
        per_group = mixer.num_heads // mixer.n_groups
        groups = [head // per_group for head in self.heads]
        # The B/C group that each query-key pair starts from, and the pair that each grafted head uses.
        self.pair_groups = sorted(set(groups)) if spec["shared"] else groups
        self.pair_of_head = Index([self.pair_groups.index(g) for g in groups] if spec["shared"] else range(len(groups)))
        self.other_groups = Index([head // per_group for head in self.others.values])
        size = len(self.pair_groups) * self.width
        if spec.get("direct"):
            raise ValueError("grafts of heads that start from a donor's went with version 0.22; load them with 0.21")
        self.own_values = spec.get("own_values", False)
        if self.own_values:
            inner = len(self.heads) * mixer.head_dim
            self.v_proj = nn.Linear(mixer.in_proj.in_features, inner)
            self.o_proj = nn.Linear(inner, mixer.out_proj.out_features, bias=False)
        bias = mixer.in_proj.bias is not None
        self.q_proj = nn.Linear(mixer.in_proj.in_features, size, bias=bias)
        self.k_proj = nn.Linear(mixer.in_proj.in_features, size, bias=bias)
        conv, self.qk_conv = getattr(mixer, "conv1d", None), None
        if conv is not None:
            (taps,), bias = conv.kernel_size, conv.bias is not None
            self.qk_conv = nn.Conv1d(2 * size, 2 * size, taps, groups=2 * size, bias=bias, padding=taps - 1)

    def project(self, hidden_states: Tensor) -> Tensor:
        """Queries and keys before the convolution, if there is one: (b, t, 2 * pairs * width)."""
        return torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states)], dim=-1)

    def values(self, hidden_states: Tensor) -> Tensor:
        """The graft's own values, (b, t, grafted heads, p)."""
        return self.v_proj(hidden_states).unflatten(-1, (len(self.heads), -1))

    def written(self, attended: Tensor) -> Tensor:
        """What a graft with values of its own adds to the mixer's output: (..., grafted heads, p) -> (..., d)."""
        assert self.gate is not None  # such a graft has one
        return self.o_proj((attended * self.gate[:, None].to(attended.dtype)).flatten(-2))

    def split(self, qk: Tensor, log_write: Tensor | None) -> tuple[Tensor, Tensor]:
        """qk (b, t, 2 * pairs * width), prepared, and what is added to the scores, (b, t, grafted heads) -> q and k, (b,
        grafted heads, t, width, or one more with log_write), such that q . k is the score, sign and scale included."""
        b, t, _ = qk.shape
        q, k = qk.view(b, t, 2, len(self.pair_groups), self.width).permute(2, 0, 3, 1, 4)
        q, k = self.pair_of_head.of(q, 1), self.pair_of_head.of(k, 1)
        q = self.sharpen(q)
        if log_write is not None:  # one more dimension: 1 in the query, log dt in the key
            q, k = F.pad(q, (0, 1), value=1.0), torch.cat([k, log_write.to(k.dtype).transpose(1, 2)[..., None]], dim=-1)
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Packing | None) -> Tensor:
        """v (b, heads, s, p) -> (b, t, heads, p)."""
        return graft_attention(q, k, v, mask) * self.sign(v).transpose(0, 1)


class DualMixer(GraftedMixer):
    """A mixer of such heads. Besides `project`, `scan`, `finish` and `own_matrices`, a subclass may say

    prepare(qk)            what the base does to queries and keys before they meet; nothing, unless it says so
    log_write(projected)   the logarithm of what a token is written with, (b, t, grafted heads); of the time step
    weights(projected)     what multiplies the attention of a head, (b, t, grafted heads); None, for nothing
    """

    graft: DualGraft | None
    graft_class: ClassVar[type[Graft]] = DualGraft

    def prepare(self: Any, qk: Tensor) -> Tensor:
        return qk

    def log_write(self: Any, projected: Any) -> Tensor:
        return self.graft.grafted.of(projected.dt, -1).clamp_min(SMALLEST).log()

    def weights(self: Any, projected: Any) -> Tensor | None:
        return None

    def convolve(
        self: Any,
        hidden_states: Tensor,
        xBC: Tensor,
        cache_params: Cache | None,
        attention_mask: Tensor | None,
        packing: Packing | None = None,
        *,
        clear: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """xBC (b, t, channels) convolved and activated, and likewise the graft's queries and keys, (b, t,
        2 * pairs * width) or None. clear: padding is zero before the convolution already, not only after it.

        The convolution is depthwise, so queries and keys ride along with xBC, and need no call and no state in the cache of
        their own. Where they learn they go alone: what the base computes from frozen weights then stays without a gradient.
        """
        weight, bias = self.conv1d.weight, self.conv1d.bias

        def through(m: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            m = apply_mask_to_padding_states(m, attention_mask) if clear else m
            silu = self.activation in SILU
            m = convolved(m, weight, bias, cache_params, self.layer_idx, silu, packing)
            return apply_mask_to_padding_states(m if silu else self.act(m), attention_mask)

        if self.graft is None:
            return through(xBC, weight, bias), None
        qk, own = self.graft.project(hidden_states), self.graft.qk_conv
        if cache_params is None and learns(qk, own.weight, own.bias):
            return through(xBC, weight, bias), through(qk, own.weight, own.bias)
        with own_precision(xBC.device.type):  # autocast to bfloat16 takes no float16 here
            weight = torch.cat([weight, own.weight])
            bias = None if bias is None else torch.cat([bias, own.bias])  # both follow use_conv_bias
        both = through(torch.cat([xBC, qk], dim=-1), weight, bias)
        return both.split([xBC.shape[-1], qk.shape[-1]], dim=-1)

    def run_ssd(
        self: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        cache: Cache | None,
        packing: Packing | None,
    ) -> Tensor:
        """The SSD scan of ssm_heads, or its single step where the cache holds a state, which it then updates: (b, t, heads, p).
        x (b, t, heads, p), dt (b, t, heads), A and D (heads,), B and C (b, t, g, n) of all groups."""
        if len(self.ssm_heads) < self.num_heads and self.n_groups > 1:  # the remaining heads need not fill their groups evenly
            of = self.graft.other_groups
            B, C = of.of(B, 2), of.of(C, 2)
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            return ssd_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)[:, None]
        y, state = ssd_scan(x, dt, A, B, C, D, state, packing=packing, chunk_size=self.chunk_size)
        if cache is not None:
            cache.update_recurrent_state(state, layer_idx=self.layer_idx)
        return y

    def attend(self: Any, projected: Any, cache: Cache | None = None, mask: Tensor | Packing | None = None) -> Tensor:
        values = self.graft.grafted.of(projected.values, 2)
        y, D = self.look_up(values, projected, cache, mask), getattr(self, "D", None)
        if (weights := self.weights(projected)) is not None:
            y = y * weights[..., None].to(y.dtype)
        return y if D is None else y + self.graft.grafted.of(D, 0)[:, None] * values

    def look_up(self: Any, values: Tensor, projected: Any, cache: Cache | None, mask: Tensor | Packing | None) -> Tensor:
        """The grafted heads' attention over values (b, t, grafted heads, p), in the same shape."""
        (q, k), v = self.queries_and_keys(projected), values.transpose(1, 2)
        if cache is not None:
            k, v = seen_keys(cache, self.layer_idx, k, v)
        return self.graft.attend(q, k, v, mask)

    def queries_and_keys(self: Any, projected: Any) -> tuple[Tensor, Tensor]:
        """The graft's q and k, (b, grafted heads, t, ...), such that q . k is the score."""
        graft, qk = self.graft, projected.qk
        return graft.split(self.prepare(qk), self.log_write(projected) if graft.time_step else None)

    def grafted_matrices(
        self: Any, matrices: Tensor, projected: Any, rows: Tensor | None, heads: Sequence[int] | None
    ) -> Tensor:
        """A grafted head's is its attention, or, where a blend gate is open, the mixture; that of a graft with values of its
        own is its attention, beside the head's own matrix."""
        graft = self.graft
        row_of = {head: row for row, head in enumerate(range(len(matrices)) if heads is None else heads)}
        places = [place for place, head in enumerate(graft.heads) if head in row_of]  # of the grafted heads among `heads`
        if not places:
            return matrices
        q, k = (m[:, places] for m in self.queries_and_keys(projected))
        attention = graft.sign(matrices)[places] * attention_matrix(q, k, rows=rows)[0].to(matrices.dtype)
        if (weights := self.weights(projected)) is not None:
            weights = weights[0] if rows is None else weights[0][rows]
            attention = attention * weights[:, places].T[..., None].to(attention.dtype)
        share = 1.0 if graft.gate is None or graft.own_values else graft.gate[places, None, None]
        at = [row_of[graft.heads[place]] for place in places]
        matrices[at] = (1 - share) * matrices[at] + share * attention
        return matrices
