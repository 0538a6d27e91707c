"""The selective scan in C (selective.c), its gradient, and its single step: the calls.

The forward pass keeps the states that enter every chunk of tokens, and the backward pass computes those within a chunk again:
nothing of size (b, t, d, n) is ever stored.
"""

from typing import Any

import torch
from torch import Tensor

from surgery.kernels.functions import result_dtype
from surgery.kernels.native import STEP_ALONE, Workspace, check, constant, contiguous, fields, floats
from surgery.kernels.operators import TwoPasses


class _SelectiveScan(Workspace):
    """`scan` in selective.c."""

    file = "selective"
    _fields_ = fields(
        "batch length channels size",
        "x dt B C y A D initial final checkpoints dy dx ddt dfinal dA dD dB dC dinitial",
        views="x dt B C y dy dx ddt",
    )


def step(state, x, dt, A, B, C, D) -> Tensor:
    """Arguments and results as in selective_step."""
    b, d, n = state.shape
    check((x, (b, d)), (dt, (b, d)), (A, (d, n)), (B, (b, n)), (C, (b, n)), (D, (d,)))
    A, D, B, C = contiguous(*floats(A, D, B, C))
    wide = x.float()
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    views = {name: m[:, None] for name, m in (("x", wide), ("dt", dt.float()), ("B", B), ("C", C), ("y", y))}
    _run("scan_step", alone=state.numel() <= STEP_ALONE, **views, A=A, D=D, final=state)
    return y.to(result_dtype(x))


def _run(name: str, *, alone: bool = False, **tensors: Any) -> None:
    scan = _SelectiveScan(*tensors["x"].shape, tensors["A"].shape[1], **tensors)
    scan.run(name, 1 if alone else scan.batch * -(-scan.channels // constant("selective", "group_channels")))


def _forward(x, dt, A, B, C, D, initial_state, *, keep: bool) -> tuple[Tensor, Tensor, Any]:
    (b, t, d), n, dtype = x.shape, A.shape[-1], result_dtype(x)
    check((dt, (b, t, d)), (A, (d, n)), (B, (b, t, n)), (C, (b, t, n)), (D, (d,)), (initial_state, (b, d, n)))
    x, dt, A, B, C, D, initial = floats(x, dt, A, B, C, D, initial_state)
    A, D, initial = contiguous(A, D, initial)
    y, final = torch.empty_like(x), x.new_empty(b, d, n)  # y is laid out as x is
    checkpoints = x.new_empty(b, -(-t // constant("selective", "chunk_tokens")), d, n) if keep else None
    _run("scan_forward", x=x, dt=dt, B=B, C=C, y=y, A=A, D=D, initial=initial, final=final, checkpoints=checkpoints)
    return y.to(dtype), final, checkpoints


def _backward(gradients, arguments, checkpoints) -> tuple[Tensor | None, ...]:
    """By x, dt, A, B, C, D and the initial state."""
    x, dt, A, B, C, D, dy, dfinal = floats(*arguments[:6], *gradients)
    (b, t, d), n = x.shape, A.shape[1]
    dy = x.new_zeros(x.shape) if dy is None else dy
    A, D, dfinal = contiguous(A, D, x.new_zeros(b, d, n) if dfinal is None else dfinal)
    dx, ddt = torch.empty_like(x), torch.empty_like(dt)
    dA, dinitial = torch.empty_like(dfinal), torch.empty_like(dfinal)
    dB, dC = x.new_empty(2, -(-d // constant("selective", "group_channels")), b, t, n)
    dD = x.new_empty(b, d)
    _run(
        "scan_backward", x=x, dt=dt, B=B, C=C, A=A, D=D, checkpoints=checkpoints, dy=dy, dfinal=dfinal,
        dx=dx, ddt=ddt, dA=dA, dD=dD, dB=dB, dC=dC, dinitial=dinitial,
    )  # fmt: skip
    dB, dC, dA, dD = (m.sum(0) for m in (dB, dC, dA, dD))
    return dx, ddt, dA, dB, dC, dD, dinitial


scan = TwoPasses(_forward, _backward, unread=(6,))
