"""The selective scan of Mamba-1, and its single step.

For channel c of d and state component n (Mamba, arXiv 2312.00752, equation 2 and Algorithm 2):

    S_t[c,n] = exp(A[c,n] dt_t[c]) S_{t-1}[c,n] + dt_t[c] x_t[c] B_t[n]
    y_t[c] = sum_n C_t[n] S_t[c,n] + D[c] x_t[c]

Falcon-Mamba normalises B, C and dt before the scan; the scan is the same. The time step is given ready for use: softplus, bias
and normalisation have been applied by the caller.

Every token has its own decay for every channel and component, so there is no matrix form as in Mamba-2, and tensors of size
(b, t, d, n) are what makes the stock scan slow and large. Ours work in blocks: `native` (selective_native.py, selective.c) is
C for CPUs, compiled on first use; `chunked` (selective_chunked.py) is PyTorch, for where there is no compiler or no CPU.
`mamba_ssm` is the CUDA package of Mamba's authors, `stock` the function inside transformers. `reference` walks over the tokens
and is what the others are tested against (in float64).
"""

from importlib import import_module

from typing import Any

import torch
from torch import Tensor

from surgery.kernels.dispatch import Backend, Operation, not_for_cuda_package
from surgery.kernels.functions import result_dtype, seeded, transformed
from surgery.kernels.native import refuses, step_refuses
from surgery.kernels.operators import Signature
from surgery.kernels.selective_chunked import run as run_chunked
from surgery.kernels.selective_native import scan as native_scan
from surgery.kernels.selective_native import step


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, initial_state: Tensor | None = None,
    *, packing: Any = None, backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scan a sequence.

    x and dt (b, t, d), dt positive; A (d, n), negative; B and C (b, t, n); D (d,); initial_state (b, d, n). Returns y (b, t, d)
    in the dtype of x (for float16, ours give float32), and the state after the last token (b, d, n), in float32 at least. Any
    strides will do; the mixer's own (x and dt transposed, B and C parts of one projection) are read where they are.

    packing: of the tokens, where several documents share a row; every one begins from an empty state, and the states are those
    after each, (documents, d, n).
    """
    if packing is not None:
        return packing.apply(lambda x, dt, B, C: selective_scan(x, dt, A, B, C, D, backend=backend)[0], x, dt, B, C), None
    if not x.numel():
        state = x.new_zeros(len(x), *A.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        return x.to(result_dtype(x)), state if initial_state is None else initial_state
    return SELECTIVE_SCAN(x, dt, A, B, C, D, initial_state, backend=backend)


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


def _stock(x, dt, A, B, C, D, initial_state):
    from transformers.models.mamba import modeling_mamba as stock

    x, dt, B, C = (m.transpose(1, 2) for m in (x, dt, B, C))
    y, state = stock.mamba_selective_scan(x, dt, A, B, C, D, return_last_state=True)
    return y.transpose(1, 2).to(x.dtype), state.to(torch.promote_types(state.dtype, torch.float32))


def _from_zero(x, dt, A, B, C, D, initial_state) -> str | None:
    return None if initial_state is None else "it cannot begin from an initial state"


class _WithoutGradient(torch.autograd.Function):
    """The identity, for a tensor through which another function would lose the gradient without a word."""

    @staticmethod
    def forward(ctx, m):
        return m.view_as(m)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("mamba_ssm has no gradient through the final state; ask for backend='chunked'")


def _mamba_ssm(x, dt, A, B, C, D, initial_state):
    scan = import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    u, dt, B, C = (m.to(x.dtype).transpose(1, 2) for m in (x, dt, B, C))
    y, state = scan(u, dt, A.float(), B, C, None if D is None else D.float(), return_last_state=True)
    return y.transpose(1, 2), _WithoutGradient.apply(state.float())


def _not_for_mamba_ssm(x, dt, A, *rest) -> str | None:
    if reason := not_for_cuda_package(x):
        return reason
    return "it takes states of at most 256 components" if A.shape[1] > 256 else None


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    options = seeded()
    x, B, C = (torch.randn(1, size, 40, **options).to(device, dtype).transpose(1, 2) for size in (24, 8, 8))
    dt = (0.01 + 0.1 * torch.rand(1, 24, 40, **options)).to(device, dtype).transpose(1, 2)
    A = -1 - 7 * torch.rand(24, 8, **options)
    return x, dt, A.to(device), B, C, torch.randn(24, **options).to(device), None


SELECTIVE_SCAN = Operation(
    "selective_scan",
    Backend(
        "mamba_ssm",
        _mamba_ssm,
        lambda *args: _not_for_mamba_ssm(*args) or _from_zero(*args),
        probed=True,
        opaque=True,
        without_gradient=(1,),
    ),
    Backend("native", native_scan, refuses, probed=True, opaque=True),
    Backend("chunked", run_chunked, transformed, opaque=True),
    Backend("stock", _stock, _from_zero, probed=True),
    Backend("reference", _reference),
    example=_example,
    signature=Signature(
        ("Tensor x", "Tensor dt", "Tensor A", "Tensor B", "Tensor C", "Tensor? D", "Tensor? initial_state"),
        2,
        lambda x, dt, A, *rest: [
            (x.shape, result_dtype(x)),
            ((len(x), *A.shape), torch.promote_types(x.dtype, torch.float32)),
        ],
    ),
)


def selective_step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """One token. Updates `state` (b, d, n) in place and returns y (b, d) in the dtype of x.

    x and dt (b, d), dt ready for use; A (d, n); B and C (b, n); D (d,).
    """
    return SELECTIVE_STEP(state, x, dt, A, B, C, D, backend=backend)


def _step(state, x, dt, A, B, C, D):
    work = torch.promote_types(x.dtype, torch.float32)
    wide, dt, B, C = (m.to(work) for m in (x, dt, B, C))
    new = torch.exp(A.to(work) * dt[..., None]) * state.to(work) + (dt * wide)[..., None] * B[:, None]
    state.copy_(new)
    y = (new @ C[..., None])[..., 0]
    return (y if D is None else y + D.to(work) * wide).to(result_dtype(x))


def _reference_step(state, x, dt, A, B, C, D):
    x, dt, B, C = (m[:, None] for m in (x, dt, B, C))
    y, new = _reference(x, dt, A, B, C, D, state)
    state.copy_(new)
    return y[:, 0]


def _stock_step(state, x, dt, A, B, C, D):
    from transformers.models.mamba import modeling_mamba as stock

    return stock.mamba_selective_state_update(state, x, dt, A, B, C, D)


def _mamba_ssm_step(state, x, dt, A, B, C, D):
    return import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update(state, x, dt, A, B, C, D)


def _step_example(device: torch.device, dtype: torch.dtype) -> tuple:
    x, dt, A, B, C, D, _ = _example(device, dtype)
    return torch.randn(1, 24, 8, **seeded()).to(device), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D


SELECTIVE_STEP = Operation(
    "selective_step",
    Backend(
        "mamba_ssm", _mamba_ssm_step, lambda state, x, dt, A, *rest: _not_for_mamba_ssm(x, dt, A), probed=True, opaque=True
    ),
    Backend("native", step, step_refuses, probed=True, opaque=True),
    Backend("torch", _step),
    Backend("stock", _stock_step, probed=True),
    Backend("reference", _reference_step),
    example=_step_example,
    differentiable=False,
    signature=Signature(
        ("Tensor(a!) state", "Tensor x", "Tensor dt", "Tensor A", "Tensor B", "Tensor C", "Tensor? D"),
        1,
        lambda state, x, *rest: [(x.shape, result_dtype(x))],
    ),
)
