"""The convolution and the norm of a mixer in C (pointwise.c): the calls. Neither has a gradient here."""

from ctypes import Structure, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from .native import View, check, contiguous, fill, learns, load, rows, run
from .native import refuses as not_here

TOKENS = 16  # of a unit of work, as in pointwise.c
ALONE = 2**17  # numbers up to which one thread is done about when another would have begun


class _Pointwise(Structure):
    """`pointwise` in pointwise.c."""

    _fields_ = (
        *((size, c_int64) for size in ("batch", "before", "length", "channels", "taps", "silu", "group")),
        *((name, View) for name in ("x", "gate", "y")),
        *((name, c_void_p) for name in ("weight", "bias")),
        ("epsilon", c_double),
        *((name, c_int64) for name in ("next", "failed")),
    )


def convolution_refuses(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> str | None:
    return _refuses(x, weight, bias)


def norm_refuses(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> str | None:
    return _refuses(x, weight, gate)


def _refuses(x: Tensor, *others: Tensor | None) -> str | None:
    if reason := not_here(x, *others):
        return reason
    if not x.numel():
        return "there is nothing to compute"
    return "it has no gradient" if learns(x, *others) else None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> Tensor:
    """Arguments and result as in causal_conv."""
    (b, s, c), taps = x.shape, weight.shape[-1]
    check((weight, (c, 1, taps)), (bias, (c,)))
    if not 0 < t <= s:
        raise ValueError(f"{t} outputs of {s} tokens")
    (given,), (bias,) = rows(x.float()), contiguous(None if bias is None else bias.float())
    newest_first = weight[:, 0].float().t().flip(0).contiguous()
    y = given.new_empty(b, t, c)
    _call("convolve", _Pointwise(b, s - t, t, c, taps, silu), x=given, y=y, weight=newest_first, bias=bias)
    return y.to(x.dtype)


def normalise(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> Tensor:
    """Arguments and result as in rms_norm."""
    c = x.shape[-1]
    check((weight, (c,)), (gate, tuple(x.shape)))
    if c % group:
        raise ValueError(f"{c} channels in groups of {group}")
    given, gates = _sequences(x), None if gate is None else _sequences(gate)
    (b, t, _), (weights,) = given.shape, contiguous(weight.float())
    y = given.new_empty(b, t, c)
    _call("normalise", _Pointwise(b, 0, t, c, 0, 0, group, epsilon=eps), x=given, gate=gates, y=y, weight=weights)
    return y.view(x.shape).to(torch.promote_types(x.dtype, weight.dtype))


def _sequences(m: Tensor) -> Tensor:
    return rows(m.float().reshape(-1, *m.shape[-2:]))[0]


def _call(name: str, work: _Pointwise, **tensors: Tensor | None) -> None:
    fill(work, tensors)
    alone = work.batch * work.length * work.channels <= ALONE
    units = 1 if alone else work.batch * -(-work.length // TOKENS)
    run(getattr(load("pointwise"), name), work, units)
