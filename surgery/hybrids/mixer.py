"""What a mixer of a hybrid is: linear attention of some kind, some of whose heads are attention.

It works in three steps, project, mix and finish. What passes from one to the next is a Projected: what all kinds of linear
attention have, and, in a dataclass of the mixer's own, what is its own affair. Mixer says what others may rely on;
GraftedMixer is all that follows from what a mixer has to say itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import Cache

from surgery.hybrids.constants import Constant, Index
from surgery.hybrids.parts import fetching, gather_positions
from surgery.hybrids.windows import is_window
from surgery.kernels.functions import own_precision, result_dtype
from surgery.kernels.packing import Packing

READ = ("conv1d", "dt_proj", "norm", "graft", "graft.qk_conv")  # modules of a mixer whose tensors are read without calling them
SMALLEST = 1e-30  # write strength, which has a logarithm and may divide: softplus reaches 0, in float32 too


@dataclass(eq=False)
class Projected:
    """What a mixer makes of its input (b, t, d) for each of h heads.

    values (b, t, h, p): what is written. keys, queries (b, t, g, n): what it is written and read with, each for h / g heads.
    gate (b, t, ...): what `finish` takes.
    """

    values: Tensor
    keys: Tensor
    queries: Tensor
    gate: Tensor


@runtime_checkable
class Mixer(Protocol):
    """What locate, tuning and pretraining may ask of a mixer.

    graft: its attention, or None. ssm_heads: the heads whose recurrence is computed. mask: which keys of a graft exist, as
    graft_attention takes it. packing: the documents of packed rows; there is no cache then.
    """

    graft: Any
    ssm_heads: list[int]
    layer_idx: int

    def take_grafts(self, config: Any) -> None:
        """Make room for what the configuration says of this layer."""

    def project(
        self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Projected:  # fmt: skip
        """The first step. attention_mask (b, t): which of these tokens exist. Updates the cache's state of a convolution."""

    def mix(
        self, projected: Any, cache: Cache | None = None, mask: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Every head's own mixing, a skip included: (b, t, h, p). Updates the cache's states and keys."""

    def scan(self, projected: Any, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        """The recurrence of ssm_heads, a skip included: (b, t, ssm_heads, p)."""

    def attend(self, projected: Any, cache: Cache | None = None, mask: Tensor | Packing | None = None) -> Tensor:
        """The attention of the grafted heads, a skip included: (b, t, grafted heads, p)."""

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """Norm, gate and output projection: y (..., h, p) -> (..., d)."""

    def halves(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`scan` and `attend` of an input (b, t, d), and the gate for `finish`. Of a mixer all of whose heads are scanned."""

    def matrices(self, hidden_states: Tensor, rows: Tensor | None = None, heads: Sequence[int] | None = None) -> Tensor:
        """The mixing matrices M of `heads` (of all, unless given) for one sequence (1, t, d): (heads, rows, t), such that y is
        M times the values, and the skip. Of grafted heads: their attention (where a blend gate is open, the mixture)."""


class Graft(nn.Module):
    """The attention of a layer's grafted heads. A family's own says how queries and keys are made.

    heads: sorted. gate: where a head keeps its SSM beside the attention, the share of the latter, one number a head.
    own_values: whether the graft has values of its own, and what it finds is added to what the mixer puts out.
    """

    own_values = False

    def __init__(self, spec: dict[str, Any], scores: int, all_heads: int):
        super().__init__()
        self.heads: list[int] = spec["heads"]
        self.signs = spec["signs"]
        self.grafted = Index(self.heads)
        self.others = Index(sorted({*range(all_heads)} - {*self.heads}))
        place = {head: i for i, head in enumerate(self.others.values + self.heads)}
        self.in_order = Index([place[head] for head in range(all_heads)])  # of the others' outputs and the grafted heads'
        self.width: int = spec["width"]
        self.time_step: bool = spec["time_step"]
        self.log_tau = nn.Parameter(torch.zeros(scores))
        self.gate = None if spec["blend"] is None else nn.Parameter(torch.full((len(self.heads),), float(spec["blend"])))

    @property
    def signs(self) -> list[int]:
        """sigma, +1 or -1 for each matrix of scores."""
        return self._signs.values

    @signs.setter
    def signs(self, values: list[int]) -> None:
        self._signs: Any = Constant(values)

    def sign(self, like: Tensor) -> Tensor:
        """sigma, (scores, 1, 1)."""
        return self._signs.on(like)[:, None, None]

    def sharpen(self, q: Tensor) -> Tensor:
        """q (b, scores, t, width), times sigma and tau."""
        return q * (self.sign(q) * self.log_tau.exp()[:, None, None]).to(q.dtype)

    def blend(self, y: Tensor, attended: Tensor) -> Tensor:
        """All heads' output (b, t, h, p) from the SSM's, of all heads or of those without a graft, and the attention of the
        grafted ones (b, t, grafted heads, p)."""
        attended = attended.to(y.dtype)  # a graft may be trained in another one
        if self.gate is not None:
            change = (attended - self.grafted.of(y, 2)) * self.gate[..., None, :, None].to(y.dtype)
            return y.index_add(2, self.grafted.on(y, torch.long), change)
        with own_precision(y.device.type):  # autocast to bfloat16 takes no float16 here
            return self.in_order.of(torch.cat([y, attended], dim=2), 2)


class GraftedMixer:
    """A mixin before a stock mixer, or a class of ours. A subclass has `project`, `scan`, `attend`, `finish`, and

    own_matrices(projected, rows, heads)   as `matrices`, of the mixer without its graft
    grafted_matrices(matrices, projected, rows, heads)   these, with those of the grafted heads in their place
    """

    graft: Any
    graft_class: ClassVar[type[Graft]]
    returns_pair: ClassVar[bool] = False  # whether a stock block wants a second thing of its mixer

    def take_grafts(self: Any, config: Any) -> None:
        grafts = (graft for graft in config.grafts if not is_window(graft))
        spec = next((graft for graft in grafts if graft["layer"] == self.layer_idx), None)
        make: Any = self.graft_class
        self.graft = None if spec is None else make(self, spec)
        replaced = () if self.graft is None or self.graft.gate is not None else self.graft.heads
        self.ssm_heads = [head for head in range(self.num_heads) if head not in {*replaced}]

    @fetching(*READ)
    def forward(
        self: Any, hidden_states: Tensor, cache_params: Cache | None = None, attention_mask: Tensor | None = None,
        causal_mask: Tensor | None = None, positions_to_keep: Tensor | None = None, packing: Packing | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """causal_mask: the mask of `mix`. positions_to_keep: for which of the b * t positions the output is wanted."""
        projected = self.project(hidden_states, cache_params, attention_mask, packing)
        y = self.mix(projected, cache_params, causal_mask, packing)
        mixed = self.finish(gather_positions(positions_to_keep, y), gather_positions(positions_to_keep, projected.gate))
        if self.graft is None or not self.graft.own_values:
            return mixed
        attended = self.look_up(self.graft.values(hidden_states), projected, cache_params, packing or causal_mask)
        return mixed + self.graft.written(gather_positions(positions_to_keep, attended)).to(mixed.dtype)

    def mix(
        self: Any, projected: Any, cache: Cache | None = None, mask: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        values = projected.values
        y = self.scan(projected, cache, packing) if self.ssm_heads else values[:, :, :0].to(result_dtype(values))
        if self.graft is None or self.graft.own_values:
            return y
        return self.graft.blend(y, self.attend(projected, cache, packing or mask))

    def of_scanned(self: Any, m: Tensor, dim: int) -> Tensor:
        """m, which has a place for every head along `dim`, at those of ssm_heads."""
        return m if len(self.ssm_heads) == self.num_heads else self.graft.others.of(m, dim)

    @fetching("", *READ)
    def halves(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = self.project(hidden_states)
        return self.scan(projected), self.attend(projected), projected.gate

    @fetching("", *READ)
    def matrices(self: Any, hidden_states: Tensor, rows: Tensor | None = None, heads: Sequence[int] | None = None) -> Tensor:
        projected = self.project(hidden_states)
        matrices = self.own_matrices(projected, rows, heads)
        return matrices if self.graft is None else self.grafted_matrices(matrices, projected, rows, heads)
