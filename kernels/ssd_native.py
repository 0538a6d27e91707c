"""The SSD scan in C (ssd.c), its gradient, and its single step: the calls.

The forward pass keeps the states that enter every few chunks of tokens; the backward pass computes those in between again.
"""

from ctypes import Structure, byref, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import result_dtype, without_autocast
from surgery.kernels.native import STEP_ALONE, View, check, contiguous, fill, learns, load, rows
from surgery.kernels.native import refuses as not_here
from surgery.kernels.native import run as run_in_threads
from surgery.kernels.operators import Passes

SPAN = 128  # tokens for which one state is kept: Q * KEEP in ssd.c
THREADS = 4  # that the backward pass divides its work for; their real number must not decide what is summed first
VIEWS = ("x", "dt", "B", "C", "y", "dy", "dx", "ddt", "dB", "dC", "dBs", "dCs")  # tensors whose strides C is told
FIELDS = "x dt B C y A D initial final kept dy dx ddt dB dC dBs dCs dfinal dinitial dA dD done".split()


class _Scan(Structure):
    """`scan` in ssd.c."""

    _fields_ = (
        *((size, c_int64) for size in ("batch", "length", "heads", "width", "groups", "size", "parts")),
        *((name, View if name in VIEWS else c_void_p) for name in FIELDS),
        *((name, c_int64) for name in ("next", "failed")),
    )


def refuses(x, dt, A, B, C, D, initial_state, chunk_size) -> str | None:
    return not_here(x, dt, A, B, C, D, initial_state) or (None if x.numel() else "there is nothing to compute")


def run(x, dt, A, B, C, D, initial_state, chunk_size) -> tuple[Tensor, Tensor]:
    """Arguments and results as in ssd_scan. `chunk_size` is not used: the result does not depend on it."""
    inputs = _inputs(x, dt, A, B, C, D, initial_state)
    if learns(*inputs):
        y, state = _NativeScan.apply(*inputs)
    else:
        y, state, _ = _forward(*inputs, keep=False)
    return y.to(result_dtype(x)), state


def _inputs(x, dt, A, B, C, D, initial_state) -> list[Tensor | None]:
    """In float32. Raises ValueError for shapes that do not fit."""
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    check((dt, (b, t, h)), (A, (h,)), (B, (b, t, g, n)), (C, (b, t, g, n)), (D, (h,)), (initial_state, (b, h, p, n)))
    _whole_groups(h, g)
    return [None if m is None else m.float() for m in (x, dt, A, B, C, D, initial_state)]


def _whole_groups(heads: int, groups: int) -> None:
    if heads % groups:
        raise ValueError(f"{heads} heads in {groups} groups")


def step(state, x, dt, A, B, C, D) -> Tensor:
    """Arguments and results as in ssd_step."""
    (b, h, p, n), g = state.shape, B.shape[1]
    check((x, (b, h, p)), (dt, (b, h)), (A, (h,)), (B, (b, g, n)), (C, (b, g, n)), (D, (h,)))
    _whole_groups(h, g)
    A, D = contiguous(A.float(), None if D is None else D.float())
    wide = rows(x.float(), B.float(), C.float())
    y = torch.empty_like(wide[0], memory_format=torch.contiguous_format)
    tensors = dict(zip(("x", "B", "C", "dt", "y"), (*wide, dt.float(), y), strict=True))
    views = {name: m.unsqueeze(1) for name, m in tensors.items()}  # a sequence of one token
    _call("scan_step", _scan(**views, A=A, D=D, final=state), b * h if state.numel() > STEP_ALONE else 1)
    return y.to(result_dtype(x))


def _scan(parts: int = 1, **tensors: Any) -> _Scan:
    """The structure for C: x and B give the sizes."""
    scan = _Scan(*tensors["x"].shape, *tensors["B"].shape[2:], parts)
    fill(scan, tensors)
    return scan


def _call(name: str, scan: _Scan, units: int) -> None:
    run_in_threads(_function(name), scan, units)


@cache
def _parts(groups: int, heads: int, threads: int) -> int:
    """Into how many units of work to divide the heads of a group, so that the busiest thread has least to do; `groups` counts
    those of every sequence. A unit costs about half a head beside its heads; the states of more than 8 crowd the cache."""
    rounds = {parts: -(-groups * parts // threads) for parts in range(-(-heads // 8), heads + 1)}
    return min(rounds, key=lambda parts: rounds[parts] * (-(-heads // parts) + 0.5))


@cache
def _function(name: str) -> Any:
    function = getattr(load("ssd"), name)
    function.restype = c_int64 if name == "kept_floats" else None
    return function


def _forward(x, dt, A, B, C, D, initial, *, keep: bool) -> tuple[Tensor, Tensor, Any]:
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    (x, B, C), (A, D, initial) = rows(x, B, C), contiguous(A, D, initial)
    y, final = x.new_empty(b, t, h, p), x.new_empty(b, h, p, n)
    parts = _parts(b * g, h // g, torch.get_num_threads())
    scan = _scan(parts, x=x, dt=dt, B=B, C=C, y=y, A=A, D=D, initial=initial, final=final)
    kept = x.new_empty(_function("kept_floats")(byref(scan))) if keep else None
    fill(scan, {"kept": kept})
    _call("scan_forward", scan, b * g * parts)
    return y, final, kept


class _NativeScan(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, x, dt, A, B, C, D, initial):
        y, final, kept = _forward(x, dt, A, B, C, D, initial, keep=True)
        ctx.save_for_backward(x, dt, A, B, C, D, kept)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, dy, dfinal):
        gradients = _gradients(dy, dfinal, *ctx.saved_tensors)
        return tuple(m if needed else None for m, needed in zip(gradients, ctx.needs_input_grad, strict=True))


def _gradients(dy, dfinal, x, dt, A, B, C, D, kept) -> tuple[Tensor, ...]:
    """By x, dt, A, B, C, D and the initial state."""
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    dy = x.new_zeros(p).expand(b, t, h, p) if dy is None else dy
    (x, B, C, dy), (A, D, dfinal) = rows(x, B, C, dy), contiguous(A, D, dfinal)
    dx, ddt, dB, dC, dinitial = (x.new_empty(m) for m in ((b, t, h, p), (b, t, h), B.shape, C.shape, (b, h, p, n)))
    parts = _parts(b * g, h // g, THREADS)
    dBs, dCs = x.new_empty(2, parts * b, t, g, n) if parts > 1 else (dB, dC)
    (dA, dD), done = x.new_zeros(2, b, h, dtype=torch.double), x.new_zeros(b, g, dtype=torch.int64)
    scan = _scan(
        parts, x=x, dt=dt, B=B, C=C, A=A, D=D, kept=kept, dy=dy, dfinal=dfinal, dx=dx, ddt=ddt, dB=dB, dC=dC,
        dBs=dBs, dCs=dCs, dinitial=dinitial, dA=dA, dD=dD, done=done,
    )  # fmt: skip
    _call("scan_backward", scan, b * g * parts)
    return dx, ddt, dA.sum(0).float(), dB, dC, dD.sum(0).float(), dinitial


def _keeping(x, dt, A, B, C, D, initial_state, chunk_size) -> tuple[Tensor, ...]:
    y, final, kept = _forward(*_inputs(x, dt, A, B, C, D, initial_state), keep=True)
    return y.to(result_dtype(x)), final, kept.view(len(x), -1)


def _backward(gradients, arguments, kept, needed) -> tuple[Tensor, ...]:
    dy, dfinal = (None if m is None else m.float() for m in gradients)
    x, dt, A, B, C, D, _ = _inputs(*arguments[:7])
    return _gradients(dy, dfinal, x, dt, A, B, C, D, kept)


def _kept(x, dt, A, B, *rest) -> tuple[tuple[int, ...], torch.dtype]:
    b, t, h, p = x.shape
    return (b, -(-t // SPAN) * h * _state_floats(int(p), int(B.shape[3]))), torch.float32


@cache
def _state_floats(width: int, size: int) -> int:
    """Numbers of a head's state as it is kept."""
    return _function("kept_floats")(byref(_Scan(1, 1, 1, width, 1, size, 1)))


PASSES = Passes(_keeping, _backward, _kept)
