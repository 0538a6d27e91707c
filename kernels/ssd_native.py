"""The SSD scan in C (ssd.c), its gradient, and its single step: the calls.

The forward pass keeps the states that enter every few chunks of tokens; the backward pass computes those in between again.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.functions import result_dtype
from surgery.kernels.native import STEP_ALONE, Workspace, check, contiguous, fields, floats, rows
from surgery.kernels.native import refuses as not_here
from surgery.kernels.operators import TwoPasses

THREADS = 4  # that the backward pass divides its work for; their real number must not decide what is summed first


class _NativeSSDScan(Workspace):
    """`scan` in ssd.c."""

    file = "ssd"
    _fields_ = fields(
        "batch length heads width groups size parts",
        "x dt B C y A D initial final kept dy dx ddt dB dC dBs dCs dfinal dinitial dA dD done",
        views="x dt B C y dy dx ddt dB dC dBs dCs",
    )


def refuses(x, dt, A, B, C, D, initial_state, seq_idx, chunk_size) -> str | None:
    if seq_idx is not None:
        return "it takes one document a row"
    return not_here(x, dt, A, B, C, D, initial_state)


def _whole_groups(heads: int, groups: int) -> None:
    if heads % groups:
        raise ValueError(f"{heads} heads in {groups} groups")


def step(state, x, dt, A, B, C, D) -> Tensor:
    """Arguments and results as in ssd_step."""
    (b, h, p, n), g = state.shape, B.shape[1]
    check((x, (b, h, p)), (dt, (b, h)), (A, (h,)), (B, (b, g, n)), (C, (b, g, n)), (D, (h,)))
    _whole_groups(h, g)
    A, D = contiguous(*floats(A, D))
    wide = rows(*floats(x, B, C))
    y = torch.empty_like(wide[0], memory_format=torch.contiguous_format)
    x_, B, C, dt, y_ = (m.unsqueeze(1) for m in (*wide, dt.float(), y))  # a sequence of one token
    work = _NativeSSDScan(*x_.shape, g, n, 1, x=x_, B=B, C=C, dt=dt, y=y_, A=A, D=D, final=state)
    work.run("scan_step", b * h if state.numel() > STEP_ALONE else 1)
    return y.to(result_dtype(x))


@cache
def _parts(groups: int, heads: int, threads: int) -> int:
    """Into how many units of work to divide the heads of a group, so that the busiest thread has least to do; `groups` counts
    those of every sequence. A unit costs about half a head beside its heads; the states of more than 8 crowd the cache."""
    rounds = {parts: -(-groups * parts // threads) for parts in range(-(-heads // 8), heads + 1)}
    return min(rounds, key=lambda parts: rounds[parts] * (-(-heads // parts) + 0.5))


def _forward(x, dt, A, B, C, D, initial_state, seq_idx, chunk_size, *, keep: bool) -> tuple[Tensor, Tensor, Any]:
    """As ssd_scan. `chunk_size` is not used: the result does not depend on it."""
    (b, t, h, p), (g, n), dtype = x.shape, B.shape[2:], result_dtype(x)
    check((dt, (b, t, h)), (A, (h,)), (B, (b, t, g, n)), (C, (b, t, g, n)), (D, (h,)), (initial_state, (b, h, p, n)))
    _whole_groups(h, g)
    x, dt, A, B, C, D, initial = floats(x, dt, A, B, C, D, initial_state)
    (x, B, C), (A, D, initial) = rows(x, B, C), contiguous(A, D, initial)
    y, final = x.new_empty(b, t, h, p), x.new_empty(b, h, p, n)
    parts = _parts(b * g, h // g, torch.get_num_threads())
    scan = _NativeSSDScan(b, t, h, p, g, n, parts, x=x, dt=dt, B=B, C=C, y=y, A=A, D=D, initial=initial, final=final)
    kept = x.new_empty(b, scan.call("kept_floats") // b) if keep else None
    scan.fill(kept=kept)
    scan.run("scan_forward", b * g * parts)
    return y.to(dtype), final, kept


def _backward(gradients, arguments, kept) -> tuple[Tensor | None, ...]:
    """By x, dt, A, B, C, D and the initial state."""
    x, dt, A, B, C, D, dy, dfinal = floats(*arguments[:6], *gradients)
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    dy = x.new_zeros(p).expand(b, t, h, p) if dy is None else dy
    (x, B, C, dy), (A, D, dfinal) = rows(x, B, C, dy), contiguous(A, D, dfinal)
    dx, ddt, dB, dC, dinitial = (x.new_empty(m) for m in ((b, t, h, p), (b, t, h), B.shape, C.shape, (b, h, p, n)))
    parts = _parts(b * g, h // g, THREADS)
    dBs, dCs = x.new_empty(2, parts * b, t, g, n) if parts > 1 else (dB, dC)
    (dA, dD), done = x.new_zeros(2, b, h, dtype=torch.double), x.new_zeros(b, g, dtype=torch.int64)
    scan = _NativeSSDScan(
        b, t, h, p, g, n, parts, x=x, dt=dt, B=B, C=C, A=A, D=D, kept=kept, dy=dy, dfinal=dfinal, dx=dx, ddt=ddt,
        dB=dB, dC=dC, dBs=dBs, dCs=dCs, dinitial=dinitial, dA=dA, dD=dD, done=done,
    )  # fmt: skip
    scan.run("scan_backward", b * g * parts)
    return dx, ddt, dA.sum(0).float(), dB, dC, dD.sum(0).float(), dinitial, None, None


scan = TwoPasses(_forward, _backward, unread=(6,))
