"""Ablation restricted to positions: a head's output is set to zero where a mask says so, and the model runs on.

What is zeroed is what the mixer's own step leaves for a head: for a mixer of ours the output y of its scan, and of its graft,
before the norm and the gate (so that a gated norm over several heads sees the zeros); for attention, and for other mixers, the
head's columns of what the output projection reads.

A convolution is ablated by taking away its taps beyond the current token: at the masked positions values, keys and queries are
then made of that token alone.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.locating.attribution import tapped
from surgery.modeling.graft import GraftMixer, Streams
from surgery.models.anatomy import Anatomy, MixerPlace
from surgery.records.site import Site


@dataclass(frozen=True)
class Unit:
    """What can be ablated: heads of one mixer, or (no heads) the convolution of a layer."""

    place: MixerPlace
    heads: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """ "L1.H3", "L0.H5,24,+14", "L0 convolution". No two units of a model have one name."""
        return Site(self.place.layer, self.heads).name if self.heads else f"L{self.place.layer} convolution"

    @property
    def layer(self) -> int:
        return self.place.layer


def convolutions(anatomy: Anatomy) -> list[Unit]:
    """The convolutions that can be ablated, by layer: those of mixers of ours that have more taps than one, and whose weights
    are there; accelerate fetches what it has offloaded within the forward."""
    own = [(Unit(place), _convs(place.module)) for place in anatomy.ssms if isinstance(place.module, GraftMixer)]
    return [unit for unit, convs in own if convs and not any(conv.weight.is_meta for conv in convs)]


@contextmanager
def ablated(edits: Sequence[tuple[Unit, Tensor]]) -> Iterator[None]:
    """The model of these units, each without its output at the positions of its mask (rows, tokens) bool."""
    by_mixer: dict[int, list[tuple[Unit, Tensor]]] = {}
    for unit, mask in edits:
        by_mixer.setdefault(id(unit.place.module), []).append((unit, mask))
    with ExitStack() as stack:
        for own in by_mixer.values():
            place = own[0][0].place
            if isinstance(place.module, GraftMixer):
                stack.enter_context(_tap_zeros(place, own))
            else:
                hook = place.out.register_forward_pre_hook(
                    lambda _, given, place=place, own=own: _zero_columns(place, own, given)
                )
                stack.callback(hook.remove)
        yield


@contextmanager
def _tap_zeros(place: MixerPlace, edits: list[tuple[Unit, Tensor]]) -> Iterator[None]:
    hidden: list[Tensor] = []

    def zero(y: Tensor) -> Tensor:
        y = y.clone()
        for unit, mask in edits:
            at = [head - place.first for head in unit.heads]
            y[:, :, at] = y[:, :, at].masked_fill(mask.to(y.device)[:, :, None, None], 0)
        return y

    def tap(mixer: Any, streams: Streams, y: Tensor, _: Any) -> Tensor:
        for unit, mask in edits:
            if not unit.heads:
                y = mixer.scan(_without_taps(mixer, hidden[-1], streams, mask))
        return zero(y)

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden[:] = [args[0] if args else kwargs["hidden_states"]]

    hooks = [place.module.register_forward_pre_hook(keep, with_kwargs=True)]
    if place.module.graft is not None:
        hooks.append(place.module.graft.register_forward_hook(lambda _, __, y: zero(y)))
    try:
        with tapped({place.layer: place.module}, tap):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _zero_columns(place: MixerPlace, edits: list[tuple[Unit, Tensor]], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an output projection reads, (rows, tokens, columns) or with rows and tokens as one, without the ablated heads."""
    columns = given[0].clone()
    for unit, mask in edits:
        for head in unit.heads:
            part = columns[..., place.columns(head)]
            part.masked_fill_(mask.to(part.device).reshape(*part.shape[:-1], 1), 0)
    return (columns, *given[1:])


def _without_taps(mixer: Any, hidden: Tensor, streams: Streams, mask: Tensor) -> Streams:
    """Streams that are made without earlier tokens' taps where the mask says so."""
    convs = _convs(mixer)
    own = [conv.weight.data for conv in convs]
    try:
        for conv in convs:
            conv.weight.data = torch.cat([torch.zeros_like(conv.weight[..., :-1]), conv.weight[..., -1:]], -1)
        alone = mixer.project(mixer.enter(hidden))
    finally:
        for conv, weight in zip(convs, own, strict=True):
            conv.weight.data = weight
    merged, mask = dict[str, Any](), mask.to(hidden.device)
    for field in dataclasses.fields(streams):
        one, other = getattr(alone, field.name), getattr(streams, field.name)
        merged[field.name] = (
            other if other is None else torch.where(mask.view(*mask.shape, *[1] * (other.dim() - 2)), one, other)
        )
    return Streams(**merged)


def _convs(mixer: Any) -> list[nn.Conv1d]:
    return [module for module in mixer.modules() if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1]
