"""The grafts of mixers whose heads have a matrix each (Mamba-2, Llamba's): queries and keys made as C and B are.

What they compute is in mamba2.py.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.models.mamba2.modeling_mamba2 import apply_mask_to_padding_states

from surgery.hybrids.common import Graft
from surgery.hybrids.constants import Index
from surgery.hybrids.parts import at, convolved, fetching, seen_keys
from surgery.kernels.attention import graft_attention
from surgery.kernels.conv import SILU
from surgery.kernels.functions import own_precision, result_dtype
from surgery.kernels.mixing import attention_matrix
from surgery.kernels.native import learns
from surgery.kernels.packing import Packing
from surgery.kernels.ssd import ssd_scan, ssd_step

SMALLEST = 1e-30  # write strength, of which there is a logarithm
READ = ("conv1d", "norm", "graft", "graft.qk_conv")  # modules of a mixer whose tensors are read without calling them


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
        self.direct: bool = spec.get(
            "direct", False
        )  # a donor's, which knows nothing of what the base does to queries and keys
        # Whether values are the graft's own, and what it finds is added to what the mixer puts out, all of whose heads stay.
        self.own_values: bool = spec.get("own_values", False)
        if self.own_values:
            inner = len(self.heads) * mixer.head_dim
            self.v_proj = nn.Linear(mixer.in_proj.in_features, inner)
            self.o_proj = nn.Linear(inner, mixer.out_proj.out_features, bias=False)
        bias = mixer.in_proj.bias is not None
        self.q_proj = nn.Linear(mixer.in_proj.in_features, size, bias=bias)
        self.k_proj = nn.Linear(mixer.in_proj.in_features, size, bias=bias)
        conv, self.qk_conv = getattr(mixer, "conv1d", None), None
        if conv is not None and not self.direct:
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

    def split(self, qk: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        """qk (b, t, 2 * pairs * width) after the convolution and dt (b, t, h), in float32 at least -> q and k, (b, grafted
        heads, t, width, or one more with the time step), such that q . k is the score, sign and scale included."""
        b, t, _ = qk.shape
        q, k = qk.view(b, t, 2, len(self.pair_groups), self.width).permute(2, 0, 3, 1, 4)
        q, k = self.pair_of_head.of(q, 1), self.pair_of_head.of(k, 1)
        q = self.sharpen(q)
        if self.time_step:  # one more dimension: 1 in the query, log dt in the key
            write = self.log_write(self.grafted.of(dt, -1)).to(k.dtype)
            q, k = F.pad(q, (0, 1), value=1.0), torch.cat([k, write.transpose(1, 2)[..., None]], dim=-1)
        return q, k

    def log_write(self, dt: Tensor) -> Tensor:
        """The logarithm of what the base writes with."""
        return dt.clamp_min(SMALLEST).log()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Packing | None) -> Tensor:
        """v (b, heads, s, p) -> (b, t, heads, p)."""
        return graft_attention(q, k, v, mask) * self.sign(v).transpose(0, 1)

    def into(self, matrix: Tensor, qk: Tensor, dt: Tensor, rows: Tensor | None, heads: Sequence[int] | None = None) -> Tensor:
        """The mixing matrices (heads, rows, t) of `heads` (of all, unless given) for one sequence, from the SSM's: a grafted
        head's is its attention, or, where a blend gate is open, the mixture; that of a graft with values of its own is its
        attention, which stands beside the head's own matrix."""
        row_of = {head: row for row, head in enumerate(range(len(matrix)) if heads is None else heads)}
        places = [place for place, head in enumerate(self.heads) if head in row_of]  # of the grafted heads among `heads`
        if not places:
            return matrix
        q, k = (m[:, places] for m in self.split(qk, dt))
        attention = self.sign(matrix)[places] * attention_matrix(q, k, rows=rows)[0].to(matrix.dtype)
        attention = self.weighed(attention, dt[0][..., [self.heads[place] for place in places]], rows)
        share = 1.0 if self.gate is None or self.own_values else self.gate[places, None, None]
        at = [row_of[self.heads[place]] for place in places]
        matrix[at] = (1 - share) * matrix[at] + share * attention
        return matrix

    def weighed(self, attention: Tensor, dt: Tensor, rows: Tensor | None) -> Tensor:
        """The matrices (heads, rows, t) of attention as the mixer weighs them; dt (t, heads), or as the mixer has it."""
        return attention


class DualMixer:
    """The middle step of a mixer (project, mix, finish): the scan of some heads, the attention of others.

    Stands before a mixer that has `project`, `scan` and `finish` of its own, and Mamba-2's names for its parts.
    """

    graft: DualGraft | None
    graft_class: ClassVar[type[DualGraft]] = DualGraft
    returns_pair: ClassVar[bool] = False  # whether a stock block wants a second thing of its mixer

    def take_grafts(self: Any, config: Any) -> None:
        """Make room for what the configuration says of this layer."""
        self.graft = self.graft_class.of(config, self)
        self.ssm_heads = Graft.scanned(self.graft, self.num_heads)

    @fetching(*READ)
    def forward(
        self: Any, hidden_states: Tensor, cache_params: Cache | None = None, attention_mask: Tensor | None = None,
        causal_mask: Tensor | None = None, positions_to_keep: Tensor | None = None, packing: Packing | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        gate, x, B, C, dt, qk = self.project(hidden_states, cache_params, attention_mask, packing)
        y = self.mix(x, B, C, dt, qk, cache_params, causal_mask, packing)
        mixed = self.finish(at(positions_to_keep, y), at(positions_to_keep, gate))
        if self.graft is None or not self.graft.own_values:
            return mixed
        found = self.look_up(self.graft.values(hidden_states), dt, qk, cache_params, packing or causal_mask)
        return mixed + self.graft.written(at(positions_to_keep, found)).to(mixed.dtype)

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
        if own is None:
            return through(xBC, weight, bias), qk
        if cache_params is None and learns(qk, own.weight, own.bias):
            return through(xBC, weight, bias), through(qk, own.weight, own.bias)
        with own_precision(xBC.device.type):  # autocast to bfloat16 takes no float16 here
            weight = torch.cat([weight, own.weight])
            bias = None if bias is None else torch.cat([bias, own.bias])  # both follow use_conv_bias
        both = through(torch.cat([xBC, qk], dim=-1), weight, bias)
        return both.split([xBC.shape[-1], qk.shape[-1]], dim=-1)

    def mix(
        self: Any,
        x: Tensor,
        B: Tensor,
        C: Tensor,
        dt: Tensor,
        qk: Tensor | None = None,
        cache_params: Cache | None = None,
        causal_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Every head's own mixing, the D skip included: (b, t, h, p)."""
        heads = self.ssm_heads
        if len(heads) == self.num_heads:
            y = self.scan(x, B, C, dt, heads, cache_params, packing)
        elif heads:
            others = self.graft.others
            y = self.scan(others.of(x, 2), B, C, others.of(dt, -1), heads, cache_params, packing)
        else:
            y = x[:, :, :0].to(result_dtype(x))
        if self.graft is None or self.graft.own_values:
            return y
        assert qk is not None  # project makes it wherever there is a graft
        return self.graft.blend(y, self.attend(x, dt, qk, cache_params, packing or causal_mask))

    def run_ssd(
        self: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        heads: list[int],
        cache_params: Cache | None,
        packing: Packing | None,
    ) -> Tensor:
        """The SSD scan of `heads`, all or those that are not grafted, or its single step where the cache holds a state, which
        it then updates: (b, t, heads, p). x (b, t, len(heads), p), dt (b, t, len(heads)), A and D (len(heads),), B and C
        (b, t, g, n) of all groups."""
        if len(heads) < self.num_heads and self.n_groups > 1:  # the remaining heads need not fill their groups evenly
            of = self.graft.other_groups
            B, C = of.of(B, 2), of.of(C, 2)
        state = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            return ssd_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)[:, None]
        y, state = ssd_scan(x, dt, A, B, C, D, state, packing=packing, chunk_size=self.chunk_size)
        if cache_params is not None:
            cache_params.update_recurrent_state(state, layer_idx=self.layer_idx)
        return y

    def attend(
        self: Any,
        x: Tensor,
        dt: Tensor,
        qk: Tensor,
        cache_params: Cache | None = None,
        causal_mask: Tensor | Packing | None = None,
    ) -> Tensor:
        """The grafts' mixing: (b, t, grafted heads, p)."""
        assert self.graft is not None
        x = self.graft.grafted.of(x, 2)
        y, D = self.look_up(x, dt, qk, cache_params, causal_mask), self.D
        return y if D is None else y + self.graft.grafted.of(D, 0)[:, None] * x

    def look_up(
        self: Any, values: Tensor, dt: Tensor, qk: Tensor, cache_params: Cache | None, causal_mask: Tensor | Packing | None
    ) -> Tensor:
        """The grafted heads' attention over values (b, t, grafted heads, p), in the same shape."""
        q, k = self.graft.split(qk, dt)
        v = values.transpose(1, 2)
        if cache_params is not None:
            k, v = seen_keys(cache_params, self.layer_idx, k, v)
        return self.graft.attend(q, k, v, causal_mask)

    @fetching("", *READ)
    def halves(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For locate: every head's SSM mixing (b, t, h, p), the grafted heads' attention (b, t, grafted heads, p), both with
        their D skip, and the gate that `finish` takes."""
        gate, x, B, C, dt, qk = self.project(hidden_states)
        assert qk is not None
        return self.scan(x, B, C, dt, self.ssm_heads, None), self.attend(x, dt, qk), gate
