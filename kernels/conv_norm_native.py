"""The convolution and the norm of a mixer in C (conv_norm.c), and their gradients: the calls.

What is saved for the backward pass is the input alone. Each unit of work sums up its own share in the gradients of weights, so
that the number of threads changes nothing.
"""

from typing import Any

import torch
from torch import Tensor

from surgery.kernels.native import ALONE, Workspace, check, contiguous, fields, rows
from surgery.kernels.native import refuses as not_here
from surgery.kernels.operators import TwoPasses

TOKENS = 32  # of a unit of work, as in conv_norm.c
MOST_TAPS = 16  # there


class _ConvNorm(Workspace):
    """`conv_norm` in conv_norm.c."""

    file = "conv_norm"
    _fields_ = fields(
        "batch before length channels taps silu group",
        "x gate y dy dx dgate weight bias shares",
        views="x gate y dy dx dgate",
        reals="epsilon",
    )


def convolution_refuses(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> str | None:
    if weight.shape[-1] > MOST_TAPS:
        return f"it takes {MOST_TAPS} taps at most"
    return _refuses(x, weight, bias)


def norm_refuses(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> str | None:
    return _refuses(x, weight, gate)


def _refuses(*tensors: Tensor | None) -> str | None:
    return not_here(*tensors) or (None if all(m is None or m.numel() for m in tensors) else "there is nothing to compute")


def _convolution_inputs(x: Tensor, weight: Tensor, bias: Tensor | None, t: int) -> tuple:
    """As C takes them: in float32, the taps newest first. Raises ValueError for shapes that do not fit."""
    (_, s, c), taps = x.shape, weight.shape[-1]
    check((weight, (c, 1, taps)), (bias, (c,)))
    if not 0 < t <= s:
        raise ValueError(f"{t} outputs of {s} tokens")
    newest_first = weight[:, 0].float().t().flip(0)
    return *rows(x.float()), *contiguous(newest_first, None if bias is None else bias.float())


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool, *, keep: bool) -> tuple[Tensor, None]:
    (b, s, c), dtype = x.shape, x.dtype
    x, weight, bias = _convolution_inputs(x, weight, bias, t)
    y = x.new_empty(b, t, c)
    _run("convolve", _ConvNorm(0.0, b, s - t, t, c, len(weight), silu, x=x, y=y, weight=weight, bias=bias))
    return y.to(dtype), None


def _convolve_backward(gradients: Any, arguments: Any, kept: None, needed: Any) -> tuple[Tensor | None, ...]:
    """By x, weight and bias; these two where they learn."""
    (b, s, c), (t, silu) = arguments[0].shape, arguments[3:]
    x, weight, bias = _convolution_inputs(*arguments[:4])
    (dy,), taps = rows(gradients[0].float()), len(weight)
    dx = dy.new_zeros(b, s, c) if s > t else dy.new_empty(b, s, c)  # context that no output has read has no gradient
    shares = dy.new_empty(_units(b, t), taps + 1, c) if any(needed[1:3]) else None
    work = _ConvNorm(0.0, b, s - t, t, c, taps, silu, x=x, dy=dy, dx=dx, weight=weight, bias=bias, shares=shares)
    _run("convolve_backward", work)
    if shares is None:
        return dx, None, None, None, None
    learnt = shares.sum(0)
    return dx, learnt[:taps].flip(0).t()[:, None], None if bias is None else learnt[taps], None, None


def _norm_inputs(x: Tensor, weight: Tensor, gate: Tensor | None, group: int) -> tuple:
    """As C takes them: in float32, x and gate (b, t, c). Raises ValueError for shapes that do not fit."""
    c = x.shape[-1]
    check((weight, (c,)), (gate, tuple(x.shape)))
    if c % group:
        raise ValueError(f"{c} channels in groups of {group}")
    return _sequences(x), weight.float().contiguous(), None if gate is None else _sequences(gate)


def _normalise(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int, *, keep: bool) -> tuple[Tensor, None]:
    shape, dtype = x.shape, torch.promote_types(x.dtype, weight.dtype)
    x, weight, gate = _norm_inputs(x, weight, gate, group)
    y = x.new_empty(shape)  # no view: of those that an autograd function gives, none may be changed in place
    _run("normalise", _norm_work(eps, group, x=x, gate=gate, y=y.view(x.shape), weight=weight))
    return y.to(dtype), None


def _normalise_backward(gradients: Any, arguments: Any, kept: None, needed: Any) -> tuple[Tensor | None, ...]:
    """By x, weight (where it learns) and gate."""
    x, weight, eps, gate, group = arguments
    shape, (x, weight, gate) = x.shape, _norm_inputs(x, weight, gate, group)
    dy = _sequences(gradients[0])
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgate = None if gate is None else torch.empty_like(dx)
    shares = dy.new_empty(_units(*x.shape[:2]), x.shape[2]) if needed[1] else None
    work = _norm_work(eps, group, x=x, gate=gate, dy=dy, dx=dx, dgate=dgate, weight=weight, shares=shares)
    _run("normalise_backward", work)
    by_weight, by_gate = None if shares is None else shares.sum(0), None if dgate is None else dgate.view(shape)
    return dx.view(shape), by_weight, None, by_gate, None


convolve, normalise = TwoPasses(_convolve, _convolve_backward), TwoPasses(_normalise, _normalise_backward)


def _sequences(m: Tensor) -> Tensor:
    return rows(m.float().reshape(-1, *m.shape[-2:]))[0]


def _norm_work(eps: float, group: int, *, x: Tensor, **tensors: Tensor | None) -> _ConvNorm:
    b, t, c = x.shape
    return _ConvNorm(eps, b, 0, t, c, 0, 0, group, x=x, **tensors)


def _units(batch: int, length: int) -> int:
    return batch * -(-length // TOKENS)


def _run(name: str, work: _ConvNorm) -> None:
    alone = work.batch * work.length * work.channels <= ALONE
    work.run(name, 1 if alone else _units(work.batch, work.length))
