"""The selective scan of Mamba-1, and its single step.

For channel c of d and state component n (Mamba, arXiv 2312.00752, equation 2 and Algorithm 2):

    S_t[c,n] = exp(A[c,n] dt_t[c]) S_{t-1}[c,n] + dt_t[c] x_t[c] B_t[n]
    y_t[c] = sum_n C_t[n] S_t[c,n] + D[c] x_t[c]

Falcon-Mamba normalises B, C and dt before the scan; the scan is the same. The time step is given ready for use.

Every token has its own decay for every channel and component, so there is no matrix form as in Mamba-2, and tensors of size
(b, t, d, n) are what makes the stock scan slow and large. Ours work in blocks: `native` (selective_native.py, selective.c) is
C for CPUs, compiled on first use; `chunked` (selective_chunked.py) is PyTorch, for where there is no compiler or no CPU.
`mamba_ssm` is the CUDA package of Mamba's authors, `hub` its build on the Hub. `reference` walks over the tokens.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.choose import ON_GPU, Backend, Operation, hub, import_alone
from surgery.kernels.functions import is_double, result_dtype, step_not_for_triton, transformed
from surgery.kernels.native import refuses, step_refuses
from surgery.kernels.selective_chunked import run as run_chunked
from surgery.kernels.selective_native import scan as native_scan
from surgery.kernels.selective_native import step


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    packing: Any = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scan a sequence.

    x and dt (b, t, d), dt positive; A (d, n), negative; B and C (b, t, n); D (d,); initial_state (b, d, n). Returns y (b, t, d)
    in the dtype of x (for float16, ours give float32), and the state after the last token (b, d, n), in float32 at least (None
    with packing). Any strides will do; the mixer's own are read where they are.

    packing: of the tokens, where several documents share a row; every one begins from an empty state.
    """
    if packing is not None:
        return packing.apply(lambda x, dt, B, C: selective_scan(x, dt, A, B, C, D, backend=backend)[0], x, dt, B, C), None
    if not x.numel():
        state = x.new_zeros(len(x), *A.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        return x.to(result_dtype(x)), state if initial_state is None else initial_state
    return SELECTIVE_SCAN(x, dt, A, B, C, D, initial_state, backend=backend)


def selective_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """One token. Updates `state` (b, d, n) in place and returns y (b, d) in the dtype of x.

    x and dt (b, d), dt ready for use; A (d, n); B and C (b, n); D (d,).
    """
    return SELECTIVE_STEP(state, x, dt, A, B, C, D, backend=backend)


def _reference(x, dt, A, B, C, D, initial_state):
    dtype, work = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, dt, A, B, C = (m.to(work) for m in (x, dt, A, B, C))
    state = x.new_zeros(x.shape[0], *A.shape) if initial_state is None else initial_state.to(work)
    out = []
    for t in range(x.shape[1]):
        decay = torch.exp(A * dt[:, t, :, None])
        state = decay * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        out.append((state * C[:, t, None]).sum(-1))
    y = torch.stack(out, 1)
    return (y if D is None else y + D * x).to(dtype), state


class _WithoutGradient(torch.autograd.Function):
    """The identity, for a tensor through which another function would lose the gradient without a word."""

    @staticmethod
    def forward(ctx, m):
        return m.view_as(m)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("mamba_ssm has no gradient through the final state; ask for backend='chunked'")


def _by_cuda(find: Callable[[], Any], x, dt, A, B, C, D, initial_state) -> tuple[Tensor, Tensor]:
    """By selective_scan_fn, wherever it is from."""
    u, dt, B, C = (m.to(x.dtype).transpose(1, 2) for m in (x, dt, B, C))
    y, state = find().selective_scan_fn(u, dt, A.float(), B, C, None if D is None else D.float(), return_last_state=True)
    return y.transpose(1, 2), _WithoutGradient.apply(state.float())


def _not_for_cuda(x, dt, A, B, C, D, initial_state) -> str | None:
    if reason := is_double(x):
        return reason
    if A.shape[1] > 256:
        return "it takes states of at most 256 components"
    return None if initial_state is None else "it cannot begin from an initial state"


SELECTIVE_SCAN = Operation(
    "selective_scan",
    "x:btd dt:btd+ A:dn- B:btn C:btn D?:d initial_state?:bdn",
    lambda x, dt, A, *rest: [(x.shape, result_dtype(x)), ((len(x), *A.shape), torch.promote_types(x.dtype, torch.float32))],
    2,
    Backend(
        "mamba_ssm",
        partial(_by_cuda, lambda: import_module("mamba_ssm.ops.selective_scan_interface")),
        _not_for_cuda,
        without_gradient=(1,),
        **ON_GPU,
    ),
    Backend("native", native_scan, refuses, probed=True, opaque=True),
    Backend("chunked", run_chunked, transformed, opaque=True),
    Backend(
        "hub", partial(_by_cuda, lambda: hub("mamba-ssm", 4)), _not_for_cuda, on_request=True, without_gradient=(1,), **ON_GPU
    ),
    Backend("reference", _reference),
)


def _step(state, x, dt, A, B, C, D):
    work = torch.promote_types(x.dtype, torch.float32)
    wide, dt, B, C = (m.to(work) for m in (x, dt, B, C))
    new = torch.exp(A.to(work) * dt[..., None]) * state.to(work) + (dt * wide)[..., None] * B[:, None]
    state.copy_(new)
    y = (new @ C[..., None])[..., 0]
    return (y if D is None else y + D.to(work) * wide).to(result_dtype(x))


def _step_by_triton(find: Callable[[], Any], state, x, dt, A, B, C, D) -> Tensor:
    """By selective_state_update, wherever it is from. It reads dt_bias and D whether they are there or not."""
    zero = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    return find().selective_state_update(state, x, dt, A, B, C, zero if D is None else D, dt_bias=zero)


SELECTIVE_STEP = Operation(
    "selective_step",
    "state!:bdn x:bd dt:bd+ A:dn- B:bn C:bn D?:d",
    lambda state, x, *rest: [(x.shape, result_dtype(x))],
    1,
    Backend(
        "mamba_ssm",
        partial(_step_by_triton, lambda: import_alone("mamba_ssm.ops.triton.selective_state_update")),
        step_not_for_triton,
        **ON_GPU,
    ),
    Backend("native", step, step_refuses, probed=True, opaque=True),
    Backend("hub", partial(_step_by_triton, lambda: hub("mamba-ssm", 4)), step_not_for_triton, on_request=True, **ON_GPU),
    Backend("torch", _step),
)
