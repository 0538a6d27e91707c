"""Constants of a graft on the device of its tensors: which heads, with which sign.

A list of numbers as an index would be copied from the host's memory in every step of decoding. They are no buffers, since
modules are made without values and filled with what a checkpoint holds. So each is put on a device once, and stays there; in a
trace, which may not keep tensors, it is made of slices and fills, for which nothing is copied.
"""

from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.functions import traced, transformed


class Constant:
    """Numbers as a vector. Raises ValueError for anything else, which a configuration may hold."""

    def __init__(self, values: Sequence[float]):
        self.values = list(values)
        if odd := [value for value in self.values if not isinstance(value, Real)]:
            raise ValueError(f"a graft's heads and signs are numbers, not {str(odd[0])[:40]}")
        self._placed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """On the device of `like`, in its dtype unless given."""
        dtype = like.dtype if dtype is None else dtype
        if traced(like) or transformed():
            return torch.cat(self._parts(like, dtype))
        place = (like.device, dtype)
        if place not in self._placed:
            with torch.inference_mode(False):  # it may be saved for a backward pass later
                self._placed[place] = torch.tensor(self.values, device=like.device, dtype=dtype)
        return self._placed[place]

    def _parts(self, like: Tensor, dtype: torch.dtype) -> list[Tensor]:
        changes = [i for i in range(1, len(self.values)) if self.values[i] != self.values[i - 1]]
        runs = pairwise([0, *changes, len(self.values)])
        return [like.new_full((stop - start,), self.values[start], dtype=dtype) for start, stop in runs]

    def __deepcopy__(self, memo: Any) -> "Constant":
        return type(self)(self.values)


class Index(Constant):
    """Places along a dimension, in any order."""

    values: list[int]  # type: ignore[assignment]

    def __init__(self, values: Sequence[int]):
        super().__init__(values)
        steps = [i for i in range(1, len(self.values)) if self.values[i] != self.values[i - 1] + 1]
        ends = pairwise([0, *steps, len(self.values)] if self.values else [])
        self.runs = [(self.values[start], stop - start) for start, stop in ends]  # (first, number) of places in a row

    def of(self, x: Tensor, dim: int) -> Tensor:
        """x at these places along `dim`."""
        if len(self.runs) == 1:
            return x.narrow(dim, *self.runs[0])
        if traced(x) or transformed():
            return torch.cat([x.narrow(dim, *run) for run in self.runs], dim)
        return x.index_select(dim, self.on(x, torch.long))

    def _parts(self, like: Tensor, dtype: torch.dtype) -> list[Tensor]:
        return [torch.arange(first, first + number, device=like.device, dtype=dtype) for first, number in self.runs]
