"""Documents that share a row of a batch.

Convolution, scan and attention mix tokens, and may mix those of one document only. So each document becomes a row of its own;
documents of similar length form a group, padded on the right; and the results are put back in place. Any kernel can be used
this way, no document sees another one, and a number that is not finite stays in its document. No mask is needed: all of these
are causal, and padding comes last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.kernels.functions import own_precision

PADDING = 0.25  # the share of a group's longest document by which its other documents may be shorter
FEW = 16  # tokens by which they may be shorter in any case: another call would cost more than this padding


@dataclass(frozen=True, eq=False)
class Group:
    """Documents of similar length. index (documents, longest): where their tokens are among the b * t; pads, likewise, is True
    for places that have none, or None where all have."""

    index: Tensor
    pads: Tensor | None

    def unpack(self, m: Tensor) -> Tensor:
        """m (b, t, ...) -> (documents, longest, ...), zero on padding."""
        rows = m.flatten(0, 1).index_select(0, self.index.flatten().to(m.device)).unflatten(0, self.index.shape)
        return rows if self.pads is None else rows.masked_fill_(_like(self.pads, rows), 0)


@dataclass(frozen=True, eq=False)
class Packing:
    """Which tokens of a batch (b, t) are which documents: see `packed`.

    starts, lengths (documents,): where they are among the b * t tokens. groups: all documents, by length. places (b, t): of
    every token, among those of all groups; outside (b, t): which tokens belong to no document, or None where none does. ranks
    (documents,): of every document, among those of all groups.
    """

    starts: Tensor
    lengths: Tensor
    groups: tuple[Group, ...]
    places: Tensor
    outside: Tensor | None
    ranks: Tensor

    def apply(self, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """What `run` makes of tensors (documents, longest, ...), for tensors (b, t, ...). It has to be causal; what it gives,
        (documents, longest, ...), becomes (b, t, ...), zero outside of documents."""
        return self._pack([run(*map(group.unpack, tensors)) for group in self.groups])

    def scan(self, run: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """The same where `run` gives a state after the last token as well, (documents, ...), which padding may not change."""
        parts = [run(*map(group.unpack, tensors)) for group in self.groups]
        states = _joined([state for _, state in parts])
        return self._pack([y for y, _ in parts]), states.index_select(0, self.ranks.to(states.device))

    def positions(self) -> Tensor:
        """The place of every token in its document, (b, t), counted from 0; 0 outside of documents."""
        return self.apply(lambda tokens: torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), self.places)

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        rows = _joined([part.flatten(0, 1) for part in parts])
        packed_again = rows.index_select(0, self.places.flatten().to(rows.device)).unflatten(0, self.places.shape)
        return packed_again if self.outside is None else packed_again.masked_fill_(_like(self.outside, packed_again), 0)


def packed(numbers: Tensor, device: torch.device | None = None, *, alike: bool = True) -> Packing:
    """The documents of a batch from their numbers (b, t): tokens of a row with one number are one document, and lie beside each
    other; a negative number belongs to none. device: where the tokens are, if elsewhere. alike: whether those of a group are of
    similar length; otherwise all are one group."""
    device = numbers.device if device is None else device
    shape, numbers = numbers.shape, numbers.cpu()
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    bounds = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([numbers.numel()], device="cpu")])
    inside = numbers.flatten()[bounds[:-1]] >= 0
    starts, lengths = bounds[:-1][inside], bounds.diff()[inside]
    order = lengths.argsort(descending=True, stable=True)
    places, groups, offset = torch.zeros(numbers.numel(), dtype=torch.long, device="cpu"), [], 0
    for members in order.split(_sizes(lengths[order].tolist()) if alike else [len(order)]):
        across = torch.arange(int(lengths[members[0]]), device="cpu")
        pads = across >= lengths[members, None]
        index = starts[members, None] + across.minimum(lengths[members, None] - 1)
        places[index[~pads]] = offset + (~pads).flatten().nonzero()[:, 0]
        offset += index.numel()
        groups.append(Group(index.to(device), pads.to(device) if pads.any() else None))
    outside = (numbers < 0).to(device) if bool((numbers < 0).any()) else None
    places = places.view(shape).to(device)
    return Packing(starts.to(device), lengths.to(device), tuple(groups), places, outside, order.argsort().to(device))


def check_no_state(initial_state: Tensor | None) -> None:
    """Raise ValueError: documents of a packed row begin from empty states."""
    if initial_state is not None:
        raise ValueError("packed documents begin from empty states; leave out initial_state")


def _sizes(lengths: list[int]) -> list[int]:
    """Of how many documents each group is; lengths: falling."""
    sizes: list[int] = []
    longest = 0
    for length in lengths:
        if not sizes or longest - length > max(FEW, PADDING * longest):
            sizes.append(0)
            longest = length
        sizes[-1] += 1
    return sizes


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenated in their own dtype: under autocast to bfloat16, torch.cat refuses float16."""
    with own_precision(parts[0].device.type):
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _like(mask: Tensor, m: Tensor) -> Tensor:
    """A mask (a, b) that fits m (a, b, ...)."""
    return mask.to(m.device).view(*mask.shape, *[1] * (m.dim() - 2))
