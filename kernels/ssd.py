"""The state-space dual (SSD) scan of Mamba-2, and its single step.

For one head with state size N and head width P (Mamba-2, arXiv 2405.21060, sections 5 and 6; A is the head's scalar):

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T        (P x N)
    y_t = S_t C_t + D x_t

`mamba_ssm` is the CUDA package of Mamba's authors; `native` (ssd_native.py, ssd.c) is ours, in C for a CPU; `chunked`
(ssd_chunked.py) is ours, in PyTorch, and explains the chunked form; `stock` is the function inside transformers; `reference`
walks over the tokens and is what the others are tested against (in float64).

The time step is given ready for use: softplus, bias and limits have been applied by the caller.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.dispatch import Backend, Operation, not_for_cuda_package
from surgery.kernels.functions import result_dtype, seeded, transformed
from surgery.kernels.native import step_refuses
from surgery.kernels.operators import Signature
from surgery.kernels.ssd_chunked import chunked_scan
from surgery.kernels.ssd_native import refuses, step
from surgery.kernels.ssd_native import scan as native_scan


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, initial_state: Tensor | None = None,
    *, packing: Any = None, chunk_size: int = 256, backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scan a sequence.

    x (b, t, h, p); dt (b, t, h), positive; A (h,), negative; B and C (b, t, g, n) with h a multiple of g; D (h,);
    initial_state (b, h, p, n). Returns y (b, t, h, p) in the dtype of x (for float16, ours give float32; stock always, as in
    transformers), and the state after the last token (b, h, p, n), in float32 at least unless from the reference.
    `chunk_size` is the checkpoint's; only the stock backend uses it, since the result does not depend on it.

    packing: of the tokens, where several documents share a row; every one begins from an empty state, and the states are those
    after each, (documents, h, p, n).
    """
    if packing is not None:
        options: dict[str, Any] = {"chunk_size": chunk_size, "backend": backend}
        return packing.apply(lambda x, dt, B, C: ssd_scan(x, dt, A, B, C, D, **options)[0], x, dt, B, C), None
    if not x.numel():
        state = x.new_zeros(len(x), *x.shape[2:], B.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
        return x.to(result_dtype(x)), state if initial_state is None else initial_state
    return SSD_SCAN(x, dt, A, B, C, D, initial_state, chunk_size, backend=backend)


def _reference(x, dt, A, B, C, D, initial_state, chunk_size):
    heads = x.shape[2]
    B, C = (m.repeat_interleave(heads // m.shape[2], dim=2) for m in (B, C))
    state = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[-1], dtype=x.dtype, device=x.device)
    state = state if initial_state is None else initial_state
    out = []
    for t in range(x.shape[1]):
        decay = torch.exp(A * dt[:, t])[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        out.append((state * C[:, t, :, None, :]).sum(-1))
    y = torch.stack(out, 1)
    return (y if D is None else y + D[:, None] * x), state


def _stock(x, dt, A, B, C, D, initial_state, chunk_size):
    from transformers.models.mamba2 import modeling_mamba2 as stock

    y, state = stock.mamba2_chunk_scan(
        x, dt, A, B, C, chunk_size=chunk_size, D=D, initial_states=initial_state, return_final_states=True
    )
    return y, state


def _mamba_ssm(x, dt, A, B, C, D, initial_state, chunk_size):
    scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    return scan(x, dt, A, B, C, chunk_size, D=D, initial_states=initial_state, return_final_states=True)


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    options = seeded()
    x, B, C = (torch.randn(1, 40, *shape, **options).to(device, dtype) for shape in ((4, 16), (2, 16), (2, 16)))
    dt = (0.01 + 0.1 * torch.rand(1, 40, 4, **options)).to(device, dtype)
    return x, dt, -1 - torch.rand(4, **options).to(device), B, C, None, None, 256


SSD_SCAN = Operation(
    "ssd_scan",
    Backend("mamba_ssm", _mamba_ssm, not_for_cuda_package, probed=True, opaque=True),
    Backend("native", native_scan, refuses, probed=True, opaque=True),
    Backend("chunked", chunked_scan, transformed, opaque=True),
    Backend("stock", _stock, probed=True),  # where mamba_ssm is installed it breaks on a CPU
    Backend("reference", _reference),
    example=_example,
    signature=Signature(
        (
            "Tensor x",
            "Tensor dt",
            "Tensor A",
            "Tensor B",
            "Tensor C",
            "Tensor? D",
            "Tensor? initial_state",
            "SymInt chunk_size",
        ),
        2,
        lambda x, dt, A, B, *rest: [
            (x.shape, result_dtype(x)),
            ((len(x), *x.shape[2:], B.shape[3]), torch.promote_types(x.dtype, torch.float32)),
        ],
    ),
)


def ssd_step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """One token. Updates `state` (b, h, p, n) in place and returns y (b, h, p).

    x (b, h, p); dt (b, h), ready for use; A (h,); B and C (b, g, n); D (h,).
    """
    return SSD_STEP(state, x, dt, A, B, C, D, backend=backend)


def _step(state, x, dt, A, B, C, D):
    heads, work = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    B, C = (m.to(work).repeat_interleave(heads // m.shape[1], dim=1) for m in (B, C))
    dt = dt.to(work)
    decay = torch.exp(A.to(work) * dt)[..., None, None]
    new = decay * state.to(work) + (dt[..., None] * x.to(work))[..., None] * B[:, :, None, :]
    state.copy_(new)
    y = (new @ C[..., None])[..., 0]
    return (y if D is None else y + D.to(work)[:, None] * x).to(result_dtype(x))


def _reference_step(state, x, dt, A, B, C, D):
    dtype = x.dtype
    x, dt, B, C = (m[:, None] for m in (x, dt, B, C))
    y, new = _reference(x, dt, A, B, C, D, state, None)
    state.copy_(new)
    return y[:, 0].to(dtype)


def _stock_step(state, x, dt, A, B, C, D):
    from transformers.models.mamba2 import modeling_mamba2 as stock

    return stock.mamba2_selective_state_update(state, x, *_per_channel(state, dt, A), B, C, _wide(D, x))


def _mamba_ssm_step(state, x, dt, A, B, C, D):
    update = import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    return update(state, x, *_per_channel(state, dt, A), B, C, _wide(D, x))


def _per_channel(state: Tensor, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """dt (b, h) and A (h,) as the functions of Mamba-1 want them, without a copy: (b, h, p) and (h, p, n)."""
    return dt[..., None].expand(-1, -1, state.shape[2]), A[:, None, None].expand(-1, *state.shape[2:])


def _wide(D: Tensor | None, x: Tensor) -> Tensor | None:
    return None if D is None else D[:, None].expand(-1, x.shape[-1])


def _step_example(device: torch.device, dtype: torch.dtype) -> tuple:
    x, dt, A, B, C, D, _, _ = _example(device, dtype)
    state = torch.randn(1, 4, 16, 16, **seeded()).to(device)
    return state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D


SSD_STEP = Operation(
    "ssd_step",
    Backend("mamba_ssm", _mamba_ssm_step, lambda state, x, *rest: not_for_cuda_package(x), probed=True, opaque=True),
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
