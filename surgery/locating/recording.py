"""One batch, layer by layer: the states that enter each layer, and what its mixers do with them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.hybrids.parts import bias_of, multiplied, project_in_float16
from surgery.hybrids.patching import replaced
from surgery.locating.subject import Subject
from surgery.locating.substitution import Shape, identity, tensor_of
from surgery.models.anatomy import MixerPlace
from surgery.models.finite import checked


@dataclass(frozen=True)
class Recorded:
    """What a mixer did: the states that entered it (rows, t, d), the columns that its output projection read, and its output
    (rows, t, d). project: from columns to the output.

    In float16 this project's mixers divide the columns by a power of two, and multiply the projection's result by it
    (hybrids/parts.py). The columns here are undivided, in float32.
    """

    entering: Tensor
    columns: Tensor
    output: Tensor
    shape: Shape
    project: Callable[[Tensor], Tensor]


class Walk:
    """The states of one batch at one layer after another. ids (rows, t); last (rows,): each row's last token. at: (row,
    position) of the logits that are looked at, (logits,) each; unless given, at the last tokens. shapes: of what the blocks
    return."""

    def __init__(
        self, subject: Subject, shapes: list[Shape], ids: Tensor, last: Tensor, at: tuple[Tensor, Tensor] | None = None
    ):  # fmt: skip
        self.model, self.anatomy, self.shapes, self.ids, self.last = subject.model, subject.anatomy, shapes, ids, last
        rows, positions = (torch.arange(len(ids)), last) if at is None else at
        self.at = rows.to(ids.device), positions.to(ids.device)
        self.layer, self.hidden = 0, torch.empty(0)

    def step(self) -> tuple[Tensor, list[Recorded], Tensor | None]:
        """Walk through the next layer: (states that enter it, its mixers, the logits if it is the first)."""
        layer, first = self.layer, self.layer == 0
        mixers, blocks = self.anatomy.mixers_of(layer), self.anatomy.blocks
        entering: Tensor = self.hidden
        recorders = [_Recorder(mixer) for mixer in mixers]
        own = blocks[layer].forward

        def pass_through(*args: Any, **kwargs: Any) -> Any:
            nonlocal entering
            if first:
                entering = args[0] if args else kwargs["hidden_states"]
            else:
                args, kwargs = with_states(args, kwargs, entering)
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
        """(logits, vocabulary) at `at`, or at the only position: the last block hands on no others."""
        final = self.anatomy.blocks[-1]
        if at is not None:
            forwards = {**forwards, final: handing_on(forwards.get(final, final.forward), at)}
        with replaced(forwards):
            return self.model(input_ids=ids, use_cache=False).logits[:, -1]

    def _rest(self) -> list[tuple[nn.Module, Shape]]:
        return list(zip(self.anatomy.blocks, self.shapes, strict=True))


class _Recorder:
    """Lets a mixer do its work, and keeps what a Recorded holds."""

    def __init__(self, mixer: MixerPlace):
        self.mixer, self.own = mixer, mixer.module.forward
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


def _scale(out: nn.Module, projected: Tensor, returned: Tensor) -> Tensor | None:
    """The power of two by which a mixer multiplied each token's output projection, (..., 1); None if it did anything else."""
    if projected.shape != returned.shape:
        return None
    if projected.dtype == returned.dtype:
        return torch.ones_like(projected[..., :1]) if torch.equal(projected, returned) else None
    bias = bias_of(out)
    before, after = (m.float() if bias is None else m.float() - bias for m in (projected, returned))
    ratio = after.abs().amax(-1, keepdim=True) / before.abs().amax(-1, keepdim=True)
    scale = ratio.log2().round().exp2().nan_to_num(1.0)  # 0 / 0: nothing was projected
    return scale if torch.equal(multiplied(projected, scale, bias), returned) else None


def handing_on(forward: Callable[..., Any], at: tuple[Tensor, Tensor]) -> Callable[..., Any]:
    """A block's forward that returns its states at (rows, positions) alone, each as a row of one token."""

    def gather(*args: Any, **kwargs: Any) -> Any:
        returned = forward(*args, **kwargs)
        return Shape.of(returned).around(picked(tensor_of(returned), at)[:, None])

    return gather


def picked(states: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """states (rows, t, ...) at (rows, positions); a model may be spread over several devices."""
    return states[at[0].to(states.device), at[1].to(states.device)]


def with_states(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments, with other states entering it."""
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})
