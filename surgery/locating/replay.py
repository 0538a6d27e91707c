"""Exact ablation of one head after another, through the model's own forward.

A batch walks through the model layer by layer. For layer l the states that enter it are kept; to see what another output of its
mixer does, the model runs again with the blocks before l skipped, the mixer of l returning the other output, and the blocks
after l as they are. A head of layer l therefore costs the layers after l instead of the whole model, and masks, rotary
embeddings, soft-capping and whatever else a family does stay transformers' business. Behind the last mixer nothing mixes
positions any more, so there each row's last token is enough. One layer's tensors are held at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.hybrids.parts import bias_of, multiplied, project_in_float16
from surgery.locating.patching import Shape, block_shapes, identity, replaced, tensor_of
from surgery.models.anatomy import Anatomy, Mixer
from surgery.models.finite import checked
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


@dataclass(frozen=True)
class Recorded:
    """What went on in one mixer: the states that entered it, what its output projection read, and what it returned. In float16
    this project's mixers divide what the projection reads by a power of two, and multiply what it gives (hybrids/parts.py):
    here it stands undivided, in float32. project: from columns to the output."""

    entering: Tensor
    columns: Tensor
    output: Tensor
    shape: Shape
    project: Callable[[Tensor], Tensor]


class _Walk:
    """The states of one batch at one layer after another."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy, shapes: list[Shape], ids: Tensor, last: Tensor):
        self.model, self.anatomy, self.shapes, self.ids, self.last = model, anatomy, shapes, ids, last
        self.at = torch.arange(len(ids), device=ids.device), last
        self.layer, self.hidden = 0, torch.empty(0)

    def step(self) -> tuple[Tensor, list[Recorded], Tensor | None]:
        """Walk through the next layer: (states that enter it, its mixers, the logits if it is the first)."""
        layer, first = self.layer, self.layer == 0
        mixers, blocks = self.anatomy.at(layer), self.anatomy.blocks
        entering: Tensor = self.hidden
        recorders = [_Recorder(mixer) for mixer in mixers]
        own = blocks[layer].forward

        def pass_through(*args: Any, **kwargs: Any) -> Any:
            nonlocal entering
            if first:
                entering = args[0] if args else kwargs["hidden_states"]
            else:
                args, kwargs = _with_states(args, kwargs, entering)
            with replaced({r.mixer.module: r.forward for r in recorders}):
                returned = own(*args, **kwargs)
            self.hidden = tensor_of(returned)
            return returned

        forwards: dict[nn.Module, Callable[..., Any]] = {blocks[layer]: pass_through}
        if first:  # once through the whole model, for the logits
            logits = self.logits(forwards, self.ids, self.at)
        else:
            forwards |= {block: identity(shape) for i, (block, shape) in enumerate(self._rest()) if i != layer}
            self.logits(forwards, self.ids, (self.at[0][:1], self.at[1][:1]))
            logits = None
        self.layer += 1
        return entering, [recorder.recorded(self.model) for recorder in recorders], logits

    def logits(self, forwards: dict[nn.Module, Callable[..., Any]], ids: Tensor, at: tuple[Tensor, Tensor] | None) -> Tensor:
        """(rows, vocabulary) at the positions `at`, or at the only one: the last block hands on no others."""
        final = self.anatomy.blocks[-1]
        own = forwards.get(final, final.forward)

        def gather(*args: Any, **kwargs: Any) -> Any:
            assert at is not None
            returned = own(*args, **kwargs)
            return self.shapes[-1].around(_picked(tensor_of(returned), at)[:, None])

        if at is not None:
            forwards = {**forwards, final: gather}
        with replaced(forwards):
            return self.model(input_ids=ids, use_cache=False).logits[:, -1]

    def _rest(self) -> list[tuple[nn.Module, Shape]]:
        return list(zip(self.anatomy.blocks, self.shapes, strict=True))


class _Recorder:
    """Lets a mixer do its work, and keeps what Recorded says."""

    def __init__(self, mixer: Mixer):
        self.mixer, self.own, self.found = mixer, mixer.module.forward, None
        self.projected: list[tuple[Tensor, Tensor]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        project = self.mixer.out.forward

        def out(columns: Tensor) -> Tensor:
            projected = project(columns)
            self.projected.append((columns, projected))
            return projected

        with replaced({self.mixer.out: out}):
            returned = self.own(*args, **kwargs)
        self.entering, self.returned = args[0] if args else kwargs["hidden_states"], returned
        return returned

    def recorded(self, model: PreTrainedModel) -> Recorded:
        checked(tensor_of(self.returned), f"the states that leave the {self.mixer.kind} mixer of layer {self.mixer.layer}")
        returned = tensor_of(self.returned)
        scale = _scale(self.mixer.out, self.projected[0][1], returned) if len(self.projected) == 1 else None
        if scale is None:
            family, mixer = model.config.model_type, type(self.mixer.module).__name__
            raise UserError(
                f"cannot ablate heads of a {family} model: what its {mixer} returns is not what its output projection returns; "
                "see surgery/models/anatomy.py"
            )
        columns = self.projected[0][0]
        project: Callable[[Tensor], Tensor] = self.mixer.out
        if columns.dtype != returned.dtype:
            columns, project = columns.float() * scale, partial(project_in_float16, self.mixer.out)
        return Recorded(self.entering, columns, returned, Shape.of(self.returned), project)


def _scale(out: nn.Linear, projected: Tensor, returned: Tensor) -> Tensor | None:
    """By what power of two a mixer has multiplied each token's output projection, (..., 1); None if it did anything else."""
    if projected.shape != returned.shape:
        return None
    if projected.dtype == returned.dtype:
        return torch.ones_like(projected[..., :1]) if torch.equal(projected, returned) else None
    bias = bias_of(out)
    before, after = (m.float() if bias is None else m.float() - bias for m in (projected, returned))
    ratio = after.abs().amax(-1, keepdim=True) / before.abs().amax(-1, keepdim=True)
    scale = ratio.log2().round().exp2().nan_to_num(1.0)  # 0 / 0: nothing was projected
    return scale if torch.equal(multiplied(projected, scale, bias), returned) else None


class Replay:
    """One batch of a model in eval mode, and what becomes of its logits when mixers put out something else.

    ids (rows, t), padded on the right; last (rows,): each row's last token. reference: another batch (ids, last), for "mean"
    and "resample"; donors (rows,): the row of the reference that resampling gives each row (default: in turn).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        anatomy: Anatomy,
        ids: Tensor,
        last: Tensor,
        *,
        reference: tuple[Tensor, Tensor] | None = None,
        donors: Tensor | None = None,
    ):
        if model.training:
            raise UserError("a replay needs the model in eval mode")
        self.model, self.anatomy = model, anatomy
        self.shapes = block_shapes(model, anatomy)
        self.walk = _Walk(model, anatomy, self.shapes, ids, last)
        self.reference = None if reference is None else _Walk(model, anatomy, self.shapes, *reference)
        if self.reference is not None:
            self.donors = torch.arange(len(ids)) % len(self.reference.ids) if donors is None else donors
            self.donors = self.donors.to(ids.device)

    @torch.inference_mode()
    def layers(self) -> Iterator["Layer"]:
        """Every layer in turn, each to be used before the next is asked for. The first holds the model's own logits."""
        for layer in range(len(self.anatomy.blocks)):
            hidden, mixers, logits = self.walk.step()
            reference = None if self.reference is None else self.reference.step()[1]
            if layer == 0:
                assert logits is not None
                self.base = logits
            yield Layer(self, layer, hidden, mixers, reference)


class Layer:
    """A layer of a replay. `base`: the logits (rows, vocabulary) of the model as it is."""

    def __init__(self, replay: Replay, index: int, hidden: Tensor, recorded: list[Recorded], reference: list[Recorded] | None):
        self.replay, self.index, self.base = replay, index, replay.base
        self.mixers = replay.anatomy.at(index)
        self.entering = [r.entering for r in recorded]
        # Behind the model's last mixer nothing mixes positions: the last tokens are enough.
        is_last = index >= max(replay.anatomy.layers())
        self.last_only = is_last and not any(mixer.feeds for mixer in self.mixers)
        self._hidden = self.take(hidden)
        self._recorded = recorded
        self._columns = [self.take(r.columns) for r in recorded]
        self._outputs = [self.take(r.output) for r in recorded]
        self._reference = reference

    def take(self, states: Tensor) -> Tensor:
        """What a replay needs of (rows, t, ...): all, or, behind the last mixer, the last tokens' (rows, 1, ...)."""
        return _picked(states, self.replay.walk.at)[:, None] if self.last_only else states

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
                owned = torch.arange(mixer.heads * mixer.width, device=mixer.out.weight.device)
                columns = torch.cat([owned[mixer.columns(h)] for h in mine])
            before = self._columns[i][..., columns]
            after = torch.zeros_like(before) if how == "zero" else self._instead(i, columns, how)
            if len(mine) < mixer.heads and any(other.feeds and other is not mixer for other in self._touched(heads)):
                change[i] = Edit(columns, after)  # the mixer's other heads read an ablated one
            elif has_quantised_weight(mixer.out):  # it rounds what it reads, so no part of its output can be computed apart
                change[i] = Edit(columns, after).applied(self._recorded[i].project)(self._columns[i])
            else:
                change[i] = self._outputs[i] + F.linear(after - before, mixer.out.weight[:, columns].to(before.dtype))
        return change

    def _touched(self, heads: Sequence[int] | None) -> list[Mixer]:
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
        return self.take(_picked(values, (donors, shifted)))

    def replacement(self, output: Tensor, mixer: int = 0) -> Change:
        """The change that puts out `output` (as `take` would have it) instead of what a mixer of the layer did."""
        return {mixer: output.to(self._outputs[mixer].dtype)}

    def ablated(self, heads: Sequence[int] | None = None, how: How = "zero") -> Tensor:
        """The logits (rows, vocabulary) with heads, or all of the layer's mixers, ablated; see `ablation`."""
        return self.logits(self.ablation(heads, how))[0]

    def with_output(self, output: Tensor, mixer: int = 0) -> Tensor:
        """The logits with another output of a mixer; see `replacement`."""
        return self.logits(self.replacement(output, mixer))[0]

    @torch.inference_mode()
    def logits(self, *changes: Change) -> list[Tensor]:
        """The logits (rows, vocabulary) after each of the changes, all in one batch."""
        walk, n = self.replay.walk, len(changes)
        if n > 1 and any(mixer.feeds for mixer in self.mixers):  # which of them compute anew differs between changes
            return [logits for change in changes for logits in self.logits(change)]
        stubs: dict[nn.Module, Callable[..., Any]] = {}
        changed = {i for change in changes for i in change}
        for i, mixer in enumerate(self.mixers):
            outputs = [change.get(i, self._outputs[i]) for change in changes]
            if isinstance(outputs[0], Edit):
                stubs[mixer.out] = outputs[0].applied(mixer.out.forward)
            elif i in changed or not any(self.mixers[j].feeds for j in changed):
                stubs[mixer.module] = _constant(self._recorded[i].shape.around(torch.cat(outputs)))  # type: ignore[arg-type]
            # Else it reads a changed output, and computes anew.
        blocks, shapes = self.replay.anatomy.blocks, self.replay.shapes
        own, hidden = blocks[self.index].forward, _repeated(self._hidden, n)

        def resume(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _with_states(args, kwargs, hidden)
            with replaced(stubs):  # here only: another block may use the same module
                return own(*args, **kwargs)

        skipped = zip(blocks[: self.index], shapes[: self.index], strict=True)
        forwards: dict[nn.Module, Callable[..., Any]] = {block: identity(shape) for block, shape in skipped}
        forwards[blocks[self.index]] = resume
        if self.last_only:
            logits = walk.logits(forwards, _repeated(walk.ids[walk.at][:, None], n), None)
        else:
            rows = len(walk.ids) * n
            at = torch.arange(rows, device=walk.ids.device), _repeated(walk.last, n)
            logits = walk.logits(forwards, _repeated(walk.ids, n), at)
        return list(logits.chunk(n))


def _picked(states: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """states (rows, t, ...) at (rows, positions); a model may be spread over several devices."""
    return states[at[0].to(states.device), at[1].to(states.device)]


def _repeated(tensor: Tensor, n: int) -> Tensor:
    return tensor if n == 1 else tensor.repeat(n, *[1] * (tensor.dim() - 1))


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _with_states(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments, with other states entering it."""
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})
