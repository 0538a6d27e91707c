"""Modules that do something else for a while. Afterwards all is as before, whatever happened, an interrupt included."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.hybrids.patching import hooked, replaced
from surgery.locating.subject import Subject
from surgery.models.anatomy import Anatomy
from surgery.records.site import Site


@dataclass(frozen=True)
class Shape:
    """What a module returns: a tensor (rest None), or a tuple of one and whatever else."""

    rest: tuple[Any, ...] | None

    @classmethod
    def of(cls, returned: Any) -> "Shape":
        if not isinstance(returned, tuple):
            return cls(None)
        return cls(tuple(None if isinstance(item, Tensor) else item for item in returned[1:]))  # attention weights: not kept

    def around(self, tensor: Tensor) -> Any:
        """The tensor as the module would return it."""
        return tensor if self.rest is None else (tensor, *self.rest)


def tensor_of(returned: Any) -> Tensor:
    """The hidden states in what a block or a mixer returned."""
    return returned[0] if isinstance(returned, tuple) else returned


@torch.no_grad()
def block_shapes(model: Any, blocks: Sequence[nn.Module], device: torch.device) -> list[Shape]:
    """The shape of what each block returns, from a forward of two tokens."""
    shapes: dict[nn.Module, Shape] = {}

    def note(block: nn.Module, _: Any, returned: Any) -> None:
        shapes[block] = Shape.of(returned)

    with hooked(lambda: [block.register_forward_hook(note) for block in blocks]):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)
    return [shapes[block] for block in blocks]


def identity(shape: Shape) -> Callable[..., Any]:
    """The forward of a block that is left out."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return shape.around(args[0] if args else kwargs["hidden_states"])

    return forward


@contextmanager
def skip_layers(subject: Subject, layers: Collection[int]) -> Iterator[None]:
    """The model without some of its layers, mixers and MLPs: they pass on what enters them."""
    shapes = block_shapes(subject.model, subject.anatomy.blocks, subject.model.device)
    with replaced({subject.anatomy.blocks[layer]: identity(shapes[layer]) for layer in layers}):
        yield


@contextmanager
def ablate_heads(anatomy: Anatomy, sites: Collection[Site], at: tuple[Tensor, Tensor] | None = None) -> Iterator[None]:
    """The model with the heads of `sites` at zero: the columns that their mixers' output projections read from them, at all
    positions or only `at` the given ones (rows, positions). Assumes, as in transformers, that no two mixers share a module."""
    dead: dict[nn.Module, list[slice]] = {}
    for site in sites:
        for head in site.each():
            mixer = anatomy.mixer_of(head)
            dead.setdefault(mixer.out, []).append(mixer.columns(head.heads[0]))

    def silence(out: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        columns = args[0].clone()
        for head in dead[out]:
            if at is None:
                columns[..., head] = 0
            else:
                columns[(*at, head)] = 0
        return (columns, *args[1:])

    with hooked(lambda: [out.register_forward_pre_hook(silence) for out in dead]):
        yield
