"""The convolution and the norm of a mixer in C (conv_norm.c), and their gradients: the calls.

What is saved for the backward pass is the input alone. Each unit of work sums up its own share in the gradients of weights, so
that the number of threads changes nothing.
"""

from collections.abc import Callable
from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import without_autocast
from surgery.kernels.native import ALONE, View, check, contiguous, fill, learns, load, rows, run
from surgery.kernels.native import refuses as not_here
from surgery.kernels.operators import Passes

TOKENS = 32  # of a unit of work, as in conv_norm.c
MOST_TAPS = 16  # there


class _ConvNorm(Structure):
    """`conv_norm` in conv_norm.c."""

    _fields_ = (
        *((size, c_int64) for size in ("batch", "before", "length", "channels", "taps", "silu", "group")),
        *((name, View) for name in ("x", "gate", "y", "dy", "dx", "dgate")),
        *((name, c_void_p) for name in ("weight", "bias", "shares")),
        ("epsilon", c_double),
        *((name, c_int64) for name in ("next", "failed")),
    )


def convolution_refuses(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> str | None:
    if weight.shape[-1] > MOST_TAPS:
        return f"it takes {MOST_TAPS} taps at most"
    return _refuses(x, weight, bias)


def norm_refuses(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> str | None:
    return _refuses(x, weight, gate)


def _refuses(*tensors: Tensor | None) -> str | None:
    return not_here(*tensors) or (None if all(m is None or m.numel() for m in tensors) else "there is nothing to compute")


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> Tensor:
    """Arguments and result as in causal_conv."""
    inputs = _convolution_inputs(x, weight, bias, t, silu)
    return (_Convolution.apply(*inputs) if learns(*inputs[:3]) else _convolution(*inputs)).to(x.dtype)


def _convolution_inputs(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> tuple:
    """As C takes them: in float32, the taps newest first. Raises ValueError for shapes that do not fit."""
    (_, s, c), taps = x.shape, weight.shape[-1]
    check((weight, (c, 1, taps)), (bias, (c,)))
    if not 0 < t <= s:
        raise ValueError(f"{t} outputs of {s} tokens")
    newest_first = weight[:, 0].float().t().flip(0)
    return x.float(), newest_first, None if bias is None else bias.float(), t, silu


def normalise(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> Tensor:
    """Arguments and result as in rms_norm."""
    inputs = _norm_inputs(x, weight, eps, gate, group)
    y = _Norm.apply(*inputs) if learns(*inputs[:3]) else _norm(*inputs)
    return y.view(x.shape).to(torch.promote_types(x.dtype, weight.dtype))


def _norm_inputs(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> tuple:
    """As C takes them: in float32, x and gate (b, t, c). Raises ValueError for shapes that do not fit."""
    c = x.shape[-1]
    check((weight, (c,)), (gate, tuple(x.shape)))
    if c % group:
        raise ValueError(f"{c} channels in groups of {group}")
    return _sequences(x), weight.float(), None if gate is None else _sequences(gate), eps, group


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> Tensor:
    (b, s, c), (inputs,) = x.shape, rows(x)
    weight, bias = contiguous(weight, bias)
    y = inputs.new_empty(b, t, c)
    _call("convolve", _ConvNorm(b, s - t, t, c, len(weight), silu), x=inputs, y=y, weight=weight, bias=bias)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        return _convolution(x, weight, bias, t, silu)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, weight, bias = ctx.saved_tensors
        return *_convolution_gradients(dy, x, weight, bias, ctx.silu, any(ctx.needs_input_grad[1:3])), None, None


def _convolution_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, learns: bool
) -> tuple[Tensor | None, ...]:
    """By x, weight and bias; these two where they learn."""
    (b, s, c), t, taps = x.shape, dy.shape[1], len(weight)
    (inputs, dy), (weight, bias) = rows(x, dy), contiguous(weight, bias)
    dx = dy.new_zeros(b, s, c) if s > t else dy.new_empty(b, s, c)  # context that no output has read has no gradient
    shares = dy.new_empty(_units(b, t), taps + 1, c) if learns else None
    work = _ConvNorm(b, s - t, t, c, taps, silu)
    _call("convolve_backward", work, x=inputs, dy=dy, dx=dx, weight=weight, bias=bias, shares=shares)
    if shares is None:
        return dx, None, None
    learnt = shares.sum(0)
    return dx, learnt[:taps], None if bias is None else learnt[taps]


def _convolve_backward(gradients: Any, arguments: Any, kept: Tensor, needed: Any) -> tuple[Tensor | None, ...]:
    x, newest_first, bias, _, silu = _convolution_inputs(*arguments)
    dx, dweight, dbias = _convolution_gradients(gradients[0].float(), x, newest_first, bias, silu, any(needed[1:3]))
    return dx, None if dweight is None else dweight.flip(0).t()[:, None], dbias


def _norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, group: int) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _call("normalise", _ConvNorm(*_size(x), group=group, epsilon=eps), x=x, gate=gate, y=y, weight=weight.contiguous())
    return y


class _Norm(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, group: int) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.options = {"group": group, "epsilon": eps}
        return _norm(x, weight, gate, eps, group)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, weight, gate = ctx.saved_tensors
        dx, dweight, dgate = _norm_gradients(dy, x, weight, gate, ctx.needs_input_grad[1], **ctx.options)
        return dx, dweight, dgate, None, None


def _norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, learns: bool, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """By x, weight (where it learns) and gate."""
    (dy,), (weight,) = rows(dy), contiguous(weight)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgate = None if gate is None else torch.empty_like(dx)
    shares = dy.new_empty(_units(*x.shape[:2]), x.shape[2]) if learns else None
    work = _ConvNorm(*_size(x), **options)
    _call("normalise_backward", work, x=x, gate=gate, dy=dy, dx=dx, dgate=dgate, weight=weight, shares=shares)
    return dx, None if shares is None else shares.sum(0), dgate


def _normalise_backward(gradients: Any, arguments: Any, kept: Tensor, needed: Any) -> tuple[Tensor | None, ...]:
    x, weight, gate, eps, group = _norm_inputs(*arguments)
    dy = _sequences(gradients[0])
    dx, dweight, dgate = _norm_gradients(dy, x, weight, gate, needed[1], group=group, epsilon=eps)
    shape = arguments[0].shape
    return dx.view(shape), dweight, None if dgate is None else dgate.view(shape)


def _without(run: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """A forward pass that keeps nothing: the backward pass needs its arguments alone."""
    return lambda *arguments: (run(*arguments), arguments[0].new_empty(0))


CONVOLUTION = Passes(_without(convolve), _convolve_backward, lambda x, *_: ((0,), x.dtype))
NORM = Passes(_without(normalise), _normalise_backward, lambda x, *_: ((0,), x.dtype))


def _sequences(m: Tensor) -> Tensor:
    return rows(m.float().reshape(-1, *m.shape[-2:]))[0]


def _size(m: Tensor) -> tuple[int, int, int, int]:
    return m.shape[0], 0, m.shape[1], m.shape[2]


def _units(batch: int, length: int) -> int:
    return batch * -(-length // TOKENS)


def _call(name: str, work: _ConvNorm, **tensors: Tensor | None) -> None:
    fill(work, tensors)
    alone = work.batch * work.length * work.channels <= ALONE
    run(getattr(load("conv_norm"), name), work, 1 if alone else _units(work.batch, work.length))
