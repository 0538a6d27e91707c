"""Exact ablation of one head after another, through the model's own forward.

A batch walks through the model layer by layer. For layer l the states that enter it are kept; to see what another output of its
mixer does, the model runs again with the blocks before l skipped, the mixer of l returning the other output, and the blocks
after l as they are. A head of layer l therefore costs the layers after l instead of the whole model, and masks, rotary
embeddings, soft-capping and whatever else a family does stay transformers' business. Behind the last mixer nothing mixes
positions any more, so there the tokens are enough at which logits are looked at. One layer's tensors are held at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.hybrids.patching import replaced
from surgery.locating.recording import Recorded, Walk, picked, with_states
from surgery.locating.subject import Subject
from surgery.locating.substitution import block_shapes, identity
from surgery.models.anatomy import MixerPlace
from surgery.models.offloaded import fetched
from surgery.models.quantised import has_quantised_weight

How = Literal["zero", "mean", "resample"]


@dataclass(frozen=True)
class Edit:
    """Other values for some of the columns that a mixer's output projection reads, where the rest is to be computed anew."""

    columns: slice | Tensor
    values: Tensor

    def applied(self, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The projection of edited columns."""

        def forward(columns: Tensor) -> Tensor:
            columns = columns.clone()
            columns[..., self.columns] = self.values
            return project(columns)

        return forward


# For mixers of a layer, by number within it: another output (rows, t, d), or an edit.
Change = dict[int, Tensor | Edit]


class Replay:
    """One batch of a subject, and what becomes of its logits when mixers put out something else.

    ids (rows, t), padded on the right; last (rows,): each row's last token. at: where logits are looked at (recording.Walk);
    unless given, at the last tokens. reference: another batch (ids, last), for "mean"
    and "resample"; donors (rows,): the row of the reference that resampling gives each row (default: in turn).

    Raises UserError if the model is not in eval mode.
    """

    def __init__(
        self,
        subject: Subject,
        ids: Tensor,
        last: Tensor,
        *,
        at: tuple[Tensor, Tensor] | None = None,
        reference: tuple[Tensor, Tensor] | None = None,
        donors: Tensor | None = None,
    ):
        if subject.model.training:
            raise UserError("a replay needs the model in eval mode")
        self.subject = subject
        self.shapes = block_shapes(subject.model, subject.anatomy.blocks, subject.model.device)
        self.walk = Walk(subject, self.shapes, ids, last, at)
        self.reference = None if reference is None else Walk(subject, self.shapes, *reference)
        if self.reference is not None:
            self.donors = torch.arange(len(ids)) % len(self.reference.ids) if donors is None else donors
            self.donors = self.donors.to(ids.device)

    @torch.inference_mode()
    def layers(self) -> Iterator["Layer"]:
        """Every layer in turn, each to be used before the next is asked for. The first holds the model's own logits."""
        for layer in range(len(self.subject.anatomy.blocks)):
            hidden, mixers, logits = self.walk.step()
            reference = None if self.reference is None else self.reference.step()[1]
            if layer == 0:
                assert logits is not None
                self.base = logits
            yield Layer(self, layer, hidden, mixers, reference)


class Layer:
    """A layer of a replay. `base`: the logits (logits, vocabulary) of the model as it is."""

    def __init__(self, replay: Replay, index: int, hidden: Tensor, recorded: list[Recorded], reference: list[Recorded] | None):
        self.replay, self.index, self.base = replay, index, replay.base
        anatomy = replay.subject.anatomy
        self.mixers = anatomy.mixers_of(index)
        self.entering = [r.entering for r in recorded]
        # Behind the model's last mixer nothing mixes positions: the tokens are enough at which logits are looked at.
        is_last = index >= max(anatomy.layers())
        self.picks = is_last and not any(mixer.feeds for mixer in self.mixers)
        self._hidden = self.take(hidden)
        self._recorded = recorded
        self._columns = [self.take(r.columns) for r in recorded]
        self._outputs = [self.take(r.output) for r in recorded]
        self._reference = reference

    def take(self, states: Tensor) -> Tensor:
        """What a replay needs of (rows, t, ...): all, or, behind the last mixer, what is looked at, (logits, 1, ...)."""
        return picked(states, self.replay.walk.at)[:, None] if self.picks else states

    @torch.inference_mode()
    def ablation(self, heads: Sequence[int] | None = None, how: How = "zero") -> Change:
        """The change that ablates heads of the layer, numbered within it, or (None) its mixers as a whole, biases included.

        zero: nothing comes from them. mean: what they give on average over the reference's tokens. resample: what they give in
        the donor row of the reference, aligned at the last token, and beyond its beginning, its first token's.
        """
        change: Change = {}
        for i, mixer in enumerate(self.mixers):
            if heads is None and how == "zero":
                change[i] = torch.zeros_like(self._outputs[i])
                continue
            all_heads = range(mixer.first, mixer.first + mixer.heads)
            mine = list(all_heads) if heads is None else [head for head in heads if head in all_heads]
            if not mine:
                continue
            columns: slice | Tensor = mixer.columns(mine[0])
            if len(mine) > 1:
                all_columns = torch.arange(mixer.heads * mixer.width, device=self._columns[i].device)
                columns = torch.cat([all_columns[mixer.columns(h)] for h in mine])
            before = self._columns[i][..., columns]
            after = torch.zeros_like(before) if how == "zero" else self._instead(i, columns, how)
            if len(mine) < mixer.heads and any(other.feeds and other is not mixer for other in self._touched(heads)):
                change[i] = Edit(columns, after)  # the mixer's other heads read an ablated one
            elif has_quantised_weight(mixer.out):  # it rounds what it reads, so no part of its output can be computed apart
                change[i] = Edit(columns, after).applied(self._recorded[i].project)(self._columns[i])
            else:
                with fetched(mixer.out):
                    weight = mixer.out.weight[:, columns].to(before.dtype)
                change[i] = self._outputs[i] + F.linear(after - before, weight)
        return change

    def _touched(self, heads: Sequence[int] | None) -> list[MixerPlace]:
        """The layer's mixers that have some of the heads."""
        return [m for m in self.mixers if heads is None or any(m.first <= head < m.first + m.heads for head in heads)]

    def _instead(self, i: int, columns: slice | Tensor, how: How) -> Tensor:
        """The reference's values of columns: (1, 1, columns) for the mean, (rows, t, columns) for resampling."""
        walk, other = self.replay.walk, self.replay.reference
        if other is None or self._reference is None:
            raise UserError(f"'{how}' ablation needs a reference batch")
        values = self._reference[i].columns[..., columns]
        if how == "mean":
            real = (torch.arange(values.shape[1], device=other.last.device) <= other.last[:, None]).to(values.device)
            return values[real].float().mean(0).to(values.dtype)[None, None]
        donors, positions = self.replay.donors[:, None], torch.arange(walk.ids.shape[1], device=walk.ids.device)
        shifted = positions + (other.last[donors] - walk.last[:, None])
        shifted = torch.minimum(shifted.clamp_min(0), other.last[donors])
        return self.take(picked(values, (donors, shifted)))

    def replacement(self, output: Tensor, mixer: int = 0) -> Change:
        """The change that puts out `output` (as `take` would have it) instead of what a mixer of the layer did."""
        return {mixer: output.to(self._outputs[mixer].dtype)}

    @torch.inference_mode()
    def logits(self, change: Change) -> Tensor:
        """The logits (logits, vocabulary) after a change."""
        walk = self.replay.walk
        stubs: dict[nn.Module, Callable[..., Any]] = {}
        for i, mixer in enumerate(self.mixers):
            output = change.get(i, self._outputs[i])
            if isinstance(output, Edit):
                stubs[mixer.out] = output.applied(mixer.out.forward)
            elif i in change or not any(self.mixers[j].feeds for j in change):
                stubs[mixer.module] = _constant(self._recorded[i].shape.around(output))
            # Else it reads a changed output, and computes anew.
        blocks, shapes = self.replay.subject.anatomy.blocks, self.replay.shapes
        own, hidden = blocks[self.index].forward, self._hidden

        def resume(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = with_states(args, kwargs, hidden)
            with replaced(stubs):  # here only: another block may use the same module
                return own(*args, **kwargs)

        skipped = zip(blocks[: self.index], shapes[: self.index], strict=True)
        forwards: dict[nn.Module, Callable[..., Any]] = {block: identity(shape) for block, shape in skipped}
        forwards[blocks[self.index]] = resume
        if self.picks:
            return walk.logits(forwards, walk.ids[walk.at][:, None], None)
        return walk.logits(forwards, walk.ids, walk.at)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value
