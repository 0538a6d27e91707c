"""The state-space dual (SSD) scan of Mamba-2, and its single step.

For one head with state size N and head width P (Mamba-2, arXiv 2405.21060, sections 5 and 6; A is the head's scalar):

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T        (P x N)
    y_t = S_t C_t + D x_t

`mamba_ssm` is the package of Mamba's authors (Triton), `hub` its build on Hugging Face's Hub; `native` (ssd_native.py, ssd.c)
is ours, in C for a CPU; `chunked` (ssd_chunked.py) is ours, in PyTorch; `reference` walks over the tokens, and the others are
tested against it. The time step is given ready for use: softplus, bias and limits have been applied by the caller.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.choose import ON_GPU, Backend, Operation, hub, import_alone
from surgery.kernels.functions import is_double, is_exact, on_gpu, result_dtype, step_not_for_triton, transformed
from surgery.kernels.native import step_refuses
from surgery.kernels.ssd_chunked import chunked_scan
from surgery.kernels.ssd_native import refuses, step
from surgery.kernels.ssd_native import scan as native_scan


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    packing: Any = None,
    chunk_size: int = 256,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scan a sequence.

    x (b, t, h, p); dt (b, t, h), positive; A (h,), negative; B and C (b, t, g, n) with h a multiple of g; D (h,);
    initial_state (b, h, p, n). Returns y (b, t, h, p) in the dtype of x (for float16, ours give float32), and the state after
    the last token (b, h, p, n), in float32 at least (None with packing). chunk_size is the checkpoint's; the result does not
    depend on it.

    packing: of the tokens, where several documents share a row; every one begins from an empty state. On a GPU all are one
    call.
    """
    if packing is not None:
        call = (x, dt, A, B, C, D, None, packing.seq_idx, chunk_size)
        if on_gpu(x) and SSD_SCAN.takes_packed(*call, backend=backend):
            return packing.clear(SSD_SCAN(*call, backend=backend)[0]), None
        options: dict[str, Any] = {"chunk_size": chunk_size, "backend": backend}
        return packing.apply(lambda x, dt, B, C: ssd_scan(x, dt, A, B, C, D, **options)[0], x, dt, B, C), None
    if not x.numel():
        state = x.new_zeros(len(x), *x.shape[2:], B.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
        return x.to(result_dtype(x)), state if initial_state is None else initial_state
    return SSD_SCAN(x, dt, A, B, C, D, initial_state, None, chunk_size, backend=backend)


def ssd_step(
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
    """One token. Updates `state` (b, h, p, n) in place and returns y (b, h, p).

    x (b, h, p); dt (b, h), ready for use; A (h,); B and C (b, g, n); D (h,).
    """
    return SSD_STEP(state, x, dt, A, B, C, D, backend=backend)


def _reference(x, dt, A, B, C, D, initial_state, seq_idx, chunk_size):
    B, C = (m.repeat_interleave(x.shape[2] // m.shape[2], dim=2) for m in (B, C))
    state = x.new_zeros(len(x), *x.shape[2:], B.shape[-1]) if initial_state is None else initial_state
    out = []
    for t in range(x.shape[1]):
        if t and seq_idx is not None:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay = torch.exp(A * dt[:, t])[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        out.append((state * C[:, t, :, None, :]).sum(-1))
    y = torch.stack(out, 1)
    return (y if D is None else y + D[:, None] * x), state


def _by_triton(find: Callable[[], Any], x, dt, A, B, C, D, initial_state, seq_idx, chunk_size) -> tuple[Tensor, Tensor]:
    """By mamba_chunk_scan_combined, wherever it is from."""
    options = {"D": D, "initial_states": initial_state, "seq_idx": seq_idx, "return_final_states": True}
    B, C = (m.to(x.dtype) for m in (B, C))
    y, state = find().mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **options)
    return y, state


def _not_for_triton(x, *rest) -> str | None:
    if reason := is_double(x):
        return reason
    return "it rounds float32 to TensorFloat-32, which torch is told not to do" if is_exact(x) else None


def _not_for_chunked(x, dt, A, B, C, D, initial_state, seq_idx, chunk_size) -> str | None:
    return "it takes one document a row" if seq_idx is not None else transformed()


SSD_SCAN = Operation(
    "ssd_scan",
    "x:bthp dt:bth+ A:h- B:btgn C:btgn D?:h initial_state?:bhpn seq_idx?:bt# chunk_size=SymInt",
    lambda x, dt, A, B, *rest: [
        (x.shape, result_dtype(x)),
        ((len(x), *x.shape[2:], B.shape[3]), torch.promote_types(x.dtype, torch.float32)),
    ],
    2,
    Backend(
        "mamba_ssm", partial(_by_triton, lambda: import_alone("mamba_ssm.ops.triton.ssd_combined")), _not_for_triton, **ON_GPU
    ),
    Backend("native", native_scan, refuses, probed=True, opaque=True),
    Backend("chunked", chunked_scan, _not_for_chunked, opaque=True),
    Backend("hub", partial(_by_triton, lambda: hub("mamba-ssm", 4)), _not_for_triton, on_request=True, **ON_GPU),
    Backend("reference", _reference),
)


def _step(state, x, dt, A, B, C, D):
    heads, work = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    B, C = (m.to(work).repeat_interleave(heads // m.shape[1], dim=1) for m in (B, C))
    dt = dt.to(work)
    decay = torch.exp(A.to(work) * dt)[..., None, None]
    new = decay * state.to(work) + (dt[..., None] * x.to(work))[..., None] * B[:, :, None, :]
    state.copy_(new)
    y = (new @ C[..., None])[..., 0]
    return (y if D is None else y + D.to(work)[:, None] * x).to(result_dtype(x))


def _step_by_triton(find: Callable[[], Any], state, x, dt, A, B, C, D) -> Tensor:
    """By selective_state_update, wherever it is from. It reads dt_bias and D whether they are there or not, and takes one
    number a head from tensors that are expanded over the head."""
    h, p, n = state.shape[1:]
    zero = torch.zeros(h, dtype=torch.float32, device=x.device)
    D, dt_bias = (m.float()[:, None].expand(h, p) for m in (zero if D is None else D, zero))
    A, dt = A[:, None, None].expand(h, p, n), dt[..., None].expand(-1, -1, p)
    return find().selective_state_update(state, x.contiguous(), dt, A, B, C, D, dt_bias=dt_bias)


SSD_STEP = Operation(
    "ssd_step",
    "state!:bhpn x:bhp dt:bh+ A:h- B:bgn C:bgn D?:h",
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
