"""The selective scan in C (selective.c): the call, and its gradient.

The forward pass keeps the states that enter every chunk of tokens, and the backward pass computes those within a chunk again:
nothing of size (b, t, d, n) is ever stored.
"""

from ctypes import Structure, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import result_dtype, without_autocast
from surgery.kernels.native import STEP_ALONE, View, check, contiguous, fill, learns, load
from surgery.kernels.native import run as run_in_threads
from surgery.kernels.operators import Passes

VIEWS = ("x", "dt", "B", "C", "y", "dy", "dx", "ddt")  # tensors whose strides C is told
FIELDS = "x dt B C y A D initial final checkpoints dy dx ddt dfinal dA dD dB dC dinitial".split()


class _Scan(Structure):
    """`scan` in selective.c."""

    _fields_ = (
        *((size, c_int64) for size in ("batch", "length", "channels", "size")),
        *((name, View if name in VIEWS else c_void_p) for name in FIELDS),
        *((name, c_int64) for name in ("next", "failed")),
    )


def run(x, dt, A, B, C, D, initial_state) -> tuple[Tensor, Tensor]:
    """Arguments and results as in selective_scan."""
    inputs = _inputs(x, dt, A, B, C, D, initial_state)
    if learns(*inputs):
        y, state = _NativeScan.apply(*inputs)
    else:
        y, state, _ = _forward(*inputs, keep=False)
    return y.to(result_dtype(x)), state


def _inputs(x, dt, A, B, C, D, initial_state) -> list[Tensor | None]:
    """In float32. Raises ValueError for shapes that do not fit."""
    (b, t, d), n = x.shape, A.shape[-1]
    check((dt, (b, t, d)), (A, (d, n)), (B, (b, t, n)), (C, (b, t, n)), (D, (d,)), (initial_state, (b, d, n)))
    return [None if m is None else m.float() for m in (x, dt, A, B, C, D, initial_state)]


def step(state, x, dt, A, B, C, D) -> Tensor:
    """Arguments and results as in selective_step."""
    b, d, n = state.shape
    check((x, (b, d)), (dt, (b, d)), (A, (d, n)), (B, (b, n)), (C, (b, n)), (D, (d,)))
    A, D, B, C = contiguous(A.float(), None if D is None else D.float(), B.float(), C.float())
    wide = x.float()
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    views = {name: m[:, None] for name, m in (("x", wide), ("dt", dt.float()), ("B", B), ("C", C), ("y", y))}
    _call("scan_step", alone=state.numel() <= STEP_ALONE, **views, A=A, D=D, final=state)
    return y.to(result_dtype(x))


def _call(name: str, *, alone: bool = False, **tensors: Any) -> None:
    scan = _Scan(*tensors["x"].shape, tensors["A"].shape[1])
    fill(scan, tensors)
    units = 1 if alone else scan.batch * -(-scan.channels // _constant("group_channels"))
    run_in_threads(getattr(load("selective"), name), scan, units)


def _constant(name: str) -> int:
    return c_int64.in_dll(load("selective"), name).value


def _forward(x, dt, A, B, C, D, initial, *, keep: bool) -> tuple[Tensor, Tensor, Any]:
    (b, t, d), n = x.shape, A.shape[1]
    A, D, initial = contiguous(A, D, initial)
    y, final = torch.empty_like(x), x.new_empty(b, d, n)  # y is laid out as x is
    checkpoints = x.new_empty(b, -(-t // _constant("chunk_tokens")), d, n) if keep else None
    _call("scan_forward", x=x, dt=dt, B=B, C=C, y=y, A=A, D=D, initial=initial, final=final, checkpoints=checkpoints)
    return y, final, checkpoints


class _NativeScan(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, x, dt, A, B, C, D, initial):
        y, final, checkpoints = _forward(x, dt, A, B, C, D, initial, keep=True)
        ctx.save_for_backward(x, dt, A, B, C, D, checkpoints)
        return y, final

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, dy, dfinal):
        gradients = _gradients(dy, dfinal, *ctx.saved_tensors)
        return tuple(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=True))


def _gradients(dy, dfinal, x, dt, A, B, C, D, checkpoints) -> tuple[Tensor, ...]:
    """By x, dt, A, B, C, D and the initial state."""
    A, D, dfinal = contiguous(A, D, dfinal)
    (b, t, d), n = x.shape, A.shape[1]
    dx, ddt = torch.empty_like(x), torch.empty_like(dt)
    dA, dinitial = torch.empty_like(dfinal), torch.empty_like(dfinal)
    dB, dC = x.new_empty(2, -(-d // _constant("group_channels")), b, t, n)
    dD = x.new_empty(b, d)
    _call(
        "scan_backward", x=x, dt=dt, B=B, C=C, A=A, D=D, checkpoints=checkpoints, dy=dy, dfinal=dfinal,
        dx=dx, ddt=ddt, dA=dA, dD=dD, dB=dB, dC=dC, dinitial=dinitial,
    )  # fmt: skip
    dB, dC, dA, dD = (m.sum(0) for m in (dB, dC, dA, dD))
    return dx, ddt, dA, dB, dC, dD, dinitial


def _keeping(x, dt, A, B, C, D, initial_state) -> tuple[Tensor, ...]:
    y, final, checkpoints = _forward(*_inputs(x, dt, A, B, C, D, initial_state), keep=True)
    return y.to(result_dtype(x)), final, checkpoints


def _backward(gradients, arguments, checkpoints, needed) -> tuple[Tensor, ...]:
    tensors: Any = _inputs(*arguments)
    x, dt, A, B, C, D, _ = tensors
    dy, dfinal = gradients
    dy = x.new_zeros(x.shape) if dy is None else dy.float()
    dfinal = x.new_zeros(len(x), *A.shape) if dfinal is None else dfinal.float()
    return _gradients(dy, dfinal, x, dt, A, B, C, D, checkpoints)


def _kept(x, dt, A, *rest) -> tuple[tuple[int, ...], torch.dtype]:
    b, t, d = x.shape
    return (b, -(-t // _constant("chunk_tokens")), d, A.shape[1]), torch.float32


PASSES = Passes(_keeping, _backward, _kept)
