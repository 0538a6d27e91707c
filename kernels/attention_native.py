"""Graft attention in C (attention.c) and its gradient: the calls.

What the backward pass needs beside the arguments is the result in float32 and two numbers per query, of its softmax.
"""

from typing import Any

import torch
from torch import Tensor

from surgery.kernels.native import Workspace, check, fields, rows
from surgery.kernels.native import refuses as not_here
from surgery.kernels.operators import TwoPasses

BLOCK = 64  # queries of a unit of work, as in attention.c
PARTS = 4  # units of the backward pass that a query-key pair makes where there are few: a number that threads do not decide
ALONE = 2**20  # products up to which starting a second thread takes longer than it saves
FEW = 8  # queries, fewer than which would leave most of a vector empty


class _Attention(Workspace):
    """`attention` in attention.c."""

    file = "attention"
    _fields_ = fields(
        "batch pairs queries keys width value parts",
        "q k v y dy dq dk dv dks dvs exists softmax done",
        views="q k v y dy dq dk dv dks dvs",
    )


def refuses_native(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    if reason := not_here(q, k, v, mask):
        return reason
    if mask is not None and (mask.dim() != 2 or mask.dtype != torch.bool):
        return "its mask says which keys exist: boolean, (batch, keys)"
    if not 0 < q.shape[2] <= k.shape[2]:
        return "it needs a query, and a key for every query"
    return None if q.numel() and v.numel() else "there is nothing to compute"


def declines_native(q: Tensor, *_: Tensor | None) -> str | None:
    return "torch's kernels are quicker for a few queries" if q.shape[2] < FEW else None


def _inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple:
    """In float32, their last dimension contiguous. Raises ValueError for shapes that do not fit."""
    (b, pairs, _, w), s = q.shape, k.shape[2]
    check((k, (b, pairs, s, w)), (v, (b, pairs, s, v.shape[-1])))
    if mask is not None:
        mask = mask.expand(b, s).contiguous()
    return *rows(q.float(), k.float(), v.float()), mask


def _run(name: str, parts: int, units: int, **tensors: Any) -> None:
    (b, pairs, t, w), (s, value) = tensors["q"].shape, tensors["v"].shape[2:]
    alone = b * pairs * t * s * (w + value) <= ALONE
    _Attention(b, pairs, t, s, w, value, parts, **tensors).run(name, 1 if alone else units)


def _time_first(pairs: int, t: int, like: Tensor, width: int) -> Tensor:
    """Room for (b, pairs, t, width), the pairs of a token side by side, as whoever reads it will have them."""
    return like.new_empty(len(like), t, pairs, width).transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The result, and what is kept: one after the other the result, and m and 1 / l of every query (b, pairs, t, 2)."""
    (b, pairs, t, _), dtype = q.shape, q.dtype
    q, k, v, mask = _inputs(q, k, v, mask)
    kept = q.new_empty(_kept(q, k, v, mask)[0]) if keep else None
    y, softmax = (_time_first(pairs, t, q, v.shape[3]), None) if kept is None else _split(kept, q, v)
    _run("attend_forward", 1, b * pairs * -(-t // BLOCK), q=q, k=k, v=v, exists=mask, y=y, softmax=softmax)
    return y.to(dtype), kept


def _split(kept: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, pairs, t, _ = q.shape
    y, softmax = kept.split([b * t * pairs * v.shape[3], b * t * pairs * 2])
    return y.view(b, t, pairs, -1).transpose(1, 2), softmax


def _backward(gradients: Any, arguments: Any, kept: Tensor, needed: Any) -> tuple[Tensor | None, ...]:
    """By q, k and v, where they are needed."""
    q, k, v, mask = _inputs(*arguments)
    (b, pairs, t, w), (s, value) = q.shape, v.shape[2:]
    (dy,), (y, softmax) = rows(gradients[0].float()), _split(kept, q, v)
    parts = min(PARTS, -(-t // BLOCK), -(-2 * PARTS // (b * pairs)))
    dq = dk = dks = dv = dvs = done = None
    if needed[0] or needed[1]:
        dq, dk = _time_first(pairs, t, q, w), _time_first(pairs, s, k, w)
        dks = dk if parts == 1 else k.new_empty(parts * b, pairs, s, w)
    if needed[2]:
        dv = _time_first(pairs, s, v, value)
        dvs = dv if parts == 1 else v.new_empty(parts * b, pairs, s, value)
    if parts > 1:
        done = torch.zeros(b, pairs, dtype=torch.int64, device=q.device)
    if dq is not None or dv is not None:
        _run(
            "attend_backward", parts, b * pairs * parts, q=q, k=k, v=v, exists=mask, y=y, softmax=softmax, dy=dy,
            dq=dq, dk=dk, dv=dv, dks=dks, dvs=dvs, done=done,
        )  # fmt: skip
    return dq, dk, dv, None


def _kept(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[tuple[int, ...], torch.dtype]:
    b, pairs, t, _ = q.shape
    return (b * t * pairs * (v.shape[3] + 2),), torch.float32


attend_native = TwoPasses(_forward, _backward, _kept)
