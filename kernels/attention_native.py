"""Graft attention in C (attention.c) and its gradient: the calls.

What the backward pass needs beside the arguments and the result are two numbers per query, of its softmax.
"""

from ctypes import Structure, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import without_autocast
from surgery.kernels.native import View, check, fill, learns, load, rows, run
from surgery.kernels.native import refuses as not_here
from surgery.kernels.operators import Passes

BLOCK = 64  # queries of a unit of work, as in attention.c
PARTS = 4  # units of the backward pass that a query-key pair makes where there are few: a number that threads do not decide
ALONE = 2**20  # products up to which starting a second thread takes longer than it saves
FEW = 8  # queries, fewer than which would leave most of a vector empty


class _Attention(Structure):
    """`attention` in attention.c."""

    _fields_ = (
        *((size, c_int64) for size in ("batch", "pairs", "queries", "keys", "width", "value", "parts")),
        *((name, View) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv", "dks", "dvs")),
        *((name, c_void_p) for name in ("exists", "softmax", "done")),
        *((name, c_int64) for name in ("next", "failed")),
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


def attend_native(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Arguments and result as in graft attention, one value a pair."""
    inputs = _inputs(q, k, v, mask)
    y = _NativeAttention.apply(*inputs) if learns(*inputs[:3]) else _forward(*inputs, keep=False)[0]
    return y.to(q.dtype)


def _inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple:
    """In float32. Raises ValueError for shapes that do not fit."""
    (b, pairs, _, w), s = q.shape, k.shape[2]
    check((k, (b, pairs, s, w)), (v, (b, pairs, s, v.shape[-1])))
    if mask is not None:
        mask = mask.expand(b, s).contiguous()
    return q.float(), k.float(), v.float(), mask


def _attention(parts: int = 1, **tensors: Any) -> _Attention:
    """The structure for C."""
    (b, pairs, t, w), (s, value) = tensors["q"].shape, tensors["v"].shape[2:]
    attention = _Attention(b, pairs, t, s, w, value, parts)
    fill(attention, tensors)
    return attention


def _call(name: str, attention: _Attention, units: int) -> None:
    work = attention.batch * attention.pairs * attention.queries * attention.keys * (attention.width + attention.value)
    run(_function(name), attention, 1 if work <= ALONE else units)


@cache
def _function(name: str) -> Any:
    return getattr(load("attention"), name)


def _time_first(pairs: int, t: int, like: Tensor, width: int) -> Tensor:
    """Room for (b, pairs, t, width), the pairs of a token side by side, as whoever reads it will have them."""
    return like.new_empty(len(like), t, pairs, width).transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The result, and m and 1 / l of every query (b, pairs, t, 2), if they are to be kept."""
    b, pairs, t, _ = q.shape
    q, k, v = rows(q, k, v)
    y, softmax = _time_first(pairs, t, q, v.shape[3]), q.new_empty(b, pairs, t, 2) if keep else None
    attention = _attention(q=q, k=k, v=v, exists=mask, y=y, softmax=softmax)
    _call("attend_forward", attention, b * pairs * -(-t // BLOCK))
    return y, softmax


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, q, k, v, mask):
        y, softmax = _forward(q, k, v, mask, keep=True)
        ctx.save_for_backward(q, k, v, mask, y, softmax)
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, dy):
        return *_gradients(dy, *ctx.saved_tensors, ctx.needs_input_grad), None


def _gradients(dy, q, k, v, mask, y, softmax, needed) -> tuple[Tensor | None, ...]:
    """By q, k and v, where they are needed."""
    (b, pairs, t, w), (s, value) = q.shape, v.shape[2:]
    q, k, v, y, dy = rows(q, k, v, y, dy)
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
    attention = _attention(
        parts, q=q, k=k, v=v, exists=mask, y=y, softmax=softmax, dy=dy, dq=dq, dk=dk, dv=dv, dks=dks, dvs=dvs, done=done
    )
    if dq is not None or dv is not None:
        _call("attend_backward", attention, b * pairs * parts)
    return tuple(m if want else None for m, want in zip((dq, dk, dv), needed, strict=False))


def _keeping(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    y, softmax = _forward(*_inputs(q, k, v, mask), keep=True)
    return y.to(q.dtype), torch.cat([y, softmax], dim=-1)


def _backward(gradients, arguments, kept, needed) -> tuple[Tensor | None, ...]:
    y, softmax = kept.split([kept.shape[-1] - 2, 2], dim=-1)
    own = gradients[0].float(), *_inputs(*arguments), y, softmax.contiguous()
    return *_gradients(*own, needed[:3]), None


PASSES = Passes(_keeping, _backward, lambda q, k, v, mask: ((*q.shape[:3], v.shape[3] + 2), torch.float32))
