"""Documents that share a row of a batch, and what a user says of them.

A new document begins, as everywhere in transformers, where `position_ids` do not go on by one, where `seq_idx` changes, and at
the tokens that `cu_seq_lens_q` and `cu_seq_lens_k` name: all that DataCollatorWithFlattening gives. Where several are given,
each of them may begin one.

Convolution, scan and attention mix tokens, and may mix those of one document only. So each document becomes a row of its own;
documents of similar length form a group, padded on the right; and the results are put back in place. Any causal kernel can be
used this way. Kernels that take documents in one call find them in `seq_idx`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

# How many tokens stand before each document, of all b * t, and their number at last.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens", "cu_seqlens")
PACKED = ("seq_idx", *BOUNDS)  # keyword arguments of a forward that say where documents are
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
        rows = m.flatten(0, 1).index_select(0, self.index.flatten()).unflatten(0, self.index.shape)
        return rows if self.pads is None else rows.masked_fill(_like(self.pads, rows), 0)


@dataclass(frozen=True, eq=False)
class Packing:
    """Which tokens of a batch (b, t) are which documents.

    seq_idx (b, t) int32: the document of each token, counted from 0; -1 on padding. padded: whether there is any. groups:
    all documents, by length. places (b, t): of every token, among those of all groups.
    """

    seq_idx: Tensor
    padded: bool
    groups: tuple[Group, ...]
    places: Tensor

    @classmethod
    def of(cls, numbers: Tensor, device: torch.device | None = None) -> "Packing":
        """From a number for each token (b, t): tokens of a row with one number are one document, and lie beside each other; a
        negative number belongs to none. device: where the tokens are, if elsewhere."""
        device = numbers.device if device is None else device
        shape, flat = numbers.shape, numbers.cpu().flatten()
        begins = torch.ones(shape, dtype=torch.bool, device="cpu")
        begins[:, 1:] = numbers.cpu()[:, 1:] != numbers.cpu()[:, :-1]
        bounds = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([flat.numel()], device="cpu")])
        inside = flat[bounds[:-1]] >= 0
        starts, lengths = bounds[:-1][inside], bounds.diff()[inside]
        seq_idx = torch.full_like(flat, -1, dtype=torch.int32)
        seq_idx[flat >= 0] = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32, device="cpu"), lengths)
        order = lengths.argsort(descending=True, stable=True)
        places, groups, offset = torch.zeros_like(flat), [], 0
        for members in order.split(_sizes(lengths[order].tolist())):
            across = torch.arange(int(lengths[members[0]]), device="cpu")
            pads = across >= lengths[members, None]
            index = starts[members, None] + across.minimum(lengths[members, None] - 1)
            places[index[~pads]] = offset + (~pads).flatten().nonzero()[:, 0]
            offset += index.numel()
            groups.append(Group(_send(index, device), _send(pads, device) if pads.any() else None))
        padded = not bool(inside.all())
        return cls(_send(seq_idx.view(shape), device), padded, tuple(groups), _send(places.view(shape), device))

    def apply(self, run: Callable[..., Any], *tensors: Tensor) -> Any:
        """What `run` makes of tensors (documents, longest, ...), for tensors (b, t, ...). It has to be causal. What it gives, a
        tensor (documents, longest, ...) or several, becomes (b, t, ...), zero outside of documents."""
        parts = [run(*map(group.unpack, tensors)) for group in self.groups]
        if isinstance(parts[0], Tensor):
            return self._pack(parts)
        return tuple(self._pack(list(each)) for each in zip(*parts, strict=True))

    def positions(self) -> Tensor:
        """The place of every token in its document, (b, t), counted from 0; 0 outside of documents."""
        return self.apply(lambda tokens: torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), self.places)

    def _pack(self, parts: list[Tensor]) -> Tensor:
        rows = torch.cat([part.flatten(0, 1) for part in parts])
        m = rows.index_select(0, self.places.flatten()).unflatten(0, self.places.shape)
        return self.clear(m)

    def clear(self, m: Tensor) -> Tensor:
        """m (b, t, ...), 0 outside of documents."""
        return m.masked_fill(_like(self.seq_idx < 0, m), 0) if self.padded else m


def packing_of(
    hidden: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    use_cache: bool | None,
    given: Mapping[str, Any],
) -> Packing | None:
    """The documents of hidden (b, t, ...), or None where every row is one.

    attention_mask: the user's; padding (b, t) belongs to no document, and positions on it mean nothing. given: further keyword
    arguments, PACKED among them. Raises ValueError for bounds that are not valid, for padding within a document, and for
    documents with a cache.
    """
    b, t = hidden.shape[:2]
    told = [name for name in PACKED if given.get(name) is not None]
    if t < 2 or not b or (position_ids is None and not told):
        return None
    # All of this is decided on the host, which waits for a GPU once, to get the numbers, and not for each decision.
    real = torch.ones(b, t, dtype=torch.bool, device="cpu") if attention_mask is None else attention_mask[:, -t:].bool().cpu()
    at = torch.arange(t, device="cpu").expand(b, t)
    before = torch.where(real, at, -1).cummax(-1).values.roll(1, -1)  # where the real token before each token is
    before[:, 0] = -1
    first = before < 0
    before = torch.where(first, at, before)
    begins = torch.zeros_like(real)
    if position_ids is not None and position_ids.shape[-1] == t:
        position_ids = position_ids.cpu().expand(b, t)
        step = position_ids - position_ids.gather(-1, before)
        begins = (step != 1) & (step != at - before)  # positions may count padding between two tokens, or not
    for name in told:
        numbers = _numbers(name, torch.as_tensor(given[name], device="cpu"), b, t)
        begins = begins | (numbers != numbers.gather(-1, before))
    begins = begins & real & ~first
    if not begins.any():
        return None
    if use_cache or cache is not None:
        raise ValueError("packed documents cannot be continued from a cache: leave out use_cache and the cache, or pad them")
    if (real & ~first & ~begins & (at - before > 1)).any():
        raise ValueError("there is padding within a packed document; leave it out, or put it between documents")
    return Packing.of(torch.where(real, begins.cumsum(-1), -1), hidden.device)


def _numbers(name: str, value: Tensor, b: int, t: int) -> Tensor:
    """Of every token (b, t), a number that changes where a document begins."""
    if name == "seq_idx":
        if value.numel() != b * t:
            raise ValueError(f"seq_idx holds {value.numel()} numbers for {b} x {t} tokens")
        return value.view(b, t)
    bounds = value.flatten().long()
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != b * t or (bounds.diff() < 0).any():
        raise ValueError(f"{name} has to rise from 0 to the number of tokens, {b * t}, not {bounds[:8].tolist()}")
    begins = bounds.new_zeros(b * t).index_fill(0, bounds[bounds < b * t], 1)
    return begins.cumsum(0).view(b, t)


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


def _send(m: Tensor, device: torch.device) -> Tensor:
    """m, of the host, on a device, for which the host does not wait."""
    return m.to(device, non_blocking=True)


def _like(mask: Tensor, m: Tensor) -> Tensor:
    """A mask (a, b) that fits m (a, b, ...)."""
    return mask.view(*mask.shape, *[1] * (m.dim() - 2))
