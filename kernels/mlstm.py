"""The matrix memory of xLSTM (mLSTM, arXiv 2405.04517), its single step, and its mixing matrix.

A head has an input gate i and a forget gate f, given here by the arguments of their functions, l and m. It keeps a memory C
(P x N) and the sum n of the keys that were written into it:

    i_t = exp(l_t), f_t = sigmoid(m_t);    C_t = f_t C_{t-1} + i_t v_t k_t^T,    n_t = f_t n_{t-1} + i_t k_t
    y_t = C_t q_t / max(|n_t . q_t|, 1)                                     with q divided by sqrt(N)

C and n are one scan: n is the memory of a value that is always 1. And
it is the scan of Mamba-2 (ssd.py) with decay f and without its time step, which is divided out before: `ssd` does that, at its
speed. `stock` is the function inside transformers, which keeps C and n divided by exp(s), s the largest l that is remembered;
`reference` walks over the tokens. Gates are bounded (gate_soft_cap, 15 in published models), so exp(l) needs no such care in
float32. But the quotient of transformers has a small number added below, eps exp(s), so s belongs to the state here as well:

    s_t = max(s_{t-1} + log f_t, l_t), s_0 = 0;    y_t = C_t q_t / (max(|n_t . q_t|, 1) + eps exp(s_t))
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.dispatch import Backend, Operation
from surgery.kernels.functions import result_dtype, seeded
from surgery.kernels.operators import Signature
from surgery.kernels.packing import Packing, check_no_state
from surgery.kernels.ssd import ssd_scan, ssd_step

SMALLEST = 1e-20  # decay of a token that nothing is to be forgotten at: padding
MOST = 30.0  # of |l| and |m|: exp of it, divided by the decay and summed over a context, is far from the end of float32's range

State = tuple[Tensor, Tensor]  # C and n below it, (b, h, p + 1, n), and s (b, h)


def mlstm_scan(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, forget: Tensor, state: State | None = None,
    *, eps: float = 1e-6, chunk_size: int = 64, packing: Packing | None = None, backend: str | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """Scan a sequence.

    q and k (b, t, h, n); v (b, t, h, p); write and forget (b, t, h): l and m above; -inf and inf for a token that is not to be
    remembered, nor anything forgotten at it. Returns y (b, t, h, p) in the dtype of v (for float16, ours give float32), and the
    state after the last token, in float32 at least. `chunk_size` is the checkpoint's; only the stock backend uses it.

    packing: of the tokens, where several documents share a row; every one begins from an empty state, and the states are those
    after each.
    """
    if packing is not None:
        check_no_state(None if state is None else state[0])
        options: dict[str, Any] = {"eps": eps, "chunk_size": chunk_size, "backend": backend}

        def joined(q: Tensor, k: Tensor, v: Tensor, write: Tensor, forget: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
            pads = real == 0
            gates = write.masked_fill(pads, -torch.inf), forget.masked_fill(pads, torch.inf)
            y, (memory, largest) = mlstm_scan(q, k, v, *gates, **options)
            return y, torch.cat([memory.flatten(2), largest[..., None]], -1)

        y, states = packing.scan(joined, q, k, v, write, forget, torch.ones_like(write))
        return y, (states[..., :-1].unflatten(-1, (v.shape[-1] + 1, k.shape[-1])), states[..., -1])
    memory, largest = empty_state(k, v) if state is None else state
    if not v.numel():
        return v.to(result_dtype(v)), (memory, largest)
    y, memory, largest = MLSTM_SCAN(
        write, q, k, v, forget, memory, largest, eps, chunk_size, backend=backend
    )  # all depend on it
    return y, (memory, largest)


def empty_state(k: Tensor, v: Tensor) -> State:
    """That before the first token."""
    work, (b, h) = torch.promote_types(v.dtype, torch.float32), (len(v), v.shape[2])
    return v.new_zeros(b, h, v.shape[3] + 1, k.shape[3], dtype=work), v.new_zeros(b, h, dtype=work)


def _largest(write: Tensor, decay: Tensor, before: Tensor) -> Tensor:
    """s of every token, (b, t, h). decay: -log f, (b, t, h); before (b, h)."""
    passed = decay.double().cumsum(1)
    remembered = torch.maximum((write.double() + passed).cummax(1).values, before.double()[:, None])
    return (remembered - passed).to(decay.dtype)


def _quotient(sums: Tensor, largest: Tensor, eps: float) -> Tensor:
    """y (..., p) from what was read of C and, at last, of n, (..., p + 1), and s (...)."""
    return sums[..., :-1] / (sums[..., -1:].abs().clamp_min(1) + eps * largest.exp()[..., None])


def _ready(q: Tensor, k: Tensor, v: Tensor, write: Tensor, forget: Tensor) -> tuple[Tensor, ...]:
    """q, k, v with 1 at its end, l and -log f, in float32 at least."""
    work = torch.promote_types(v.dtype, torch.float32)
    q, k, v, write, forget = (m.to(work) for m in (q, k, v, write, forget))
    return q * k.shape[-1] ** -0.5, k, F.pad(v, (0, 1), value=1.0), write, F.softplus(-forget)


def _ssd(write, q, k, v, forget, memory, largest, eps, chunk_size):
    dtype = result_dtype(v)
    q, k, v, write, decay = _ready(q, k, v, write, forget)
    step = decay.clamp_min(SMALLEST)
    x = v * (write.exp() / step)[..., None]
    sums, memory = ssd_scan(x, step, -step.new_ones(step.shape[-1]), k, q, None, memory)
    reached = _largest(write, decay, largest)
    return _quotient(sums, reached, eps).to(dtype), memory, reached[:, -1].clone()


def _stock(write, q, k, v, forget, memory, largest, eps, chunk_size):
    from transformers.models.xlstm import modeling_xlstm

    stock: Any = modeling_xlstm
    in_float32 = {"dtype_state": torch.float32}
    scale = (-largest).exp()
    y, (matrix, keys, new) = stock.wrap_chunkwise_arbitrary_sequence_length(
        stock.mlstm_chunkwise_native_autograd, partial(stock.mlstm_recurrent_sequence_native, **in_float32),
        partial(stock.mlstm_recurrent_step_native, **in_float32),
        *(m.transpose(1, 2) for m in (q, k, v, forget, write)),
        c_initial=memory[:, :, :-1].transpose(-1, -2) * scale[..., None, None], n_initial=memory[:, :, -1] * scale[..., None],
        m_initial=largest[..., None], eps=eps, chunk_size=chunk_size,
    )  # fmt: skip
    memory = torch.cat([matrix.transpose(-1, -2), keys[:, :, None]], 2) * new[..., None].exp()
    return y.transpose(1, 2), memory, new[..., 0]


def _reference(write, q, k, v, forget, memory, largest, eps, chunk_size):
    q, k, v, write, decay = _ready(q, k, v, write, forget)
    out = []
    for t in range(v.shape[1]):
        new = (v[:, t] * write[:, t, :, None].exp())[..., None] * k[:, t, :, None]
        memory = memory * (-decay[:, t]).exp()[..., None, None] + new
        largest = torch.maximum(largest - decay[:, t], write[:, t])
        out.append(_quotient((memory * q[:, t, :, None]).sum(-1), largest, eps))
    return torch.stack(out, 1), memory, largest


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    options = seeded()
    v, q, k = (torch.randn(1, 40, 4, size, **options).to(device, dtype) for size in (16, 8, 8))
    write, forget = (torch.randn(1, 40, 4, **options).to(device, dtype) for _ in range(2))
    return write, q, k, v, 3 + forget, *empty_state(k, v), 1e-6, 16


MLSTM_SCAN = Operation(
    "mlstm_scan",
    Backend("ssd", _ssd),
    Backend("stock", _stock, probed=True),
    Backend("reference", _reference),
    example=_example,
    signature=Signature(
        (
            *("Tensor write", "Tensor q", "Tensor k", "Tensor v", "Tensor forget", "Tensor memory", "Tensor largest"),
            *("float eps", "SymInt chunk_size"),
        ),
        3,
        lambda write, q, k, v, forget, memory, largest, *rest: [
            (v.shape, result_dtype(v)),
            *((m.shape, torch.promote_types(v.dtype, torch.float32)) for m in (memory, largest)),
        ],
    ),
)


def mlstm_step(
    state: State, q: Tensor, k: Tensor, v: Tensor, write: Tensor, forget: Tensor, *, eps: float = 1e-6
) -> Tensor:  # fmt: skip
    """One token. Updates the state in place and returns y (b, h, p); q and k (b, h, n), v (b, h, p), gates (b, h)."""
    memory, largest = state
    dtype = result_dtype(v)
    q, k, v, write, decay = _ready(q, k, v, write, forget)
    step = decay.clamp_min(SMALLEST)
    sums = ssd_step(memory, v * (write.exp() / step)[..., None], step, -step.new_ones(step.shape[-1]), k, q)
    largest.copy_(torch.maximum(largest - decay, write))
    return _quotient(sums, largest.to(sums.dtype), eps).to(dtype)


def mlstm_matrix(
    q: Tensor, k: Tensor, write: Tensor, forget: Tensor,
    *, eps: float = 1e-6, heads: Sequence[int] | None = None, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The matrix of an mLSTM head, such that M v is mlstm_scan's y from an empty state:

        M_ij = exp(log f_{j+1} + ... + log f_i + l_j) (q_i . k_j) / sqrt(n) / (max(|the same, summed over j|, 1) + eps exp(s_i))

    q and k (b, t, h, n); write and forget (b, t, h). Returns (b, len(heads), len(rows), t) as ssd_matrix does.
    """
    t, h = write.shape[1:]
    chosen = [range(h)[i] for i in (range(h) if heads is None else heads)]
    columns = torch.arange(t, device=write.device)
    rows = columns if rows is None else columns[rows.to(write.device)]
    q, k, _, write, decay = _ready(*(m[:, :, chosen] for m in (q, k, q, write, forget)))
    largest = _largest(write, decay, write.new_zeros(len(write), len(chosen)))[:, rows].transpose(1, 2)
    passed, write = decay.double().cumsum(1).transpose(1, 2), write.transpose(1, 2)  # b heads t
    exponent = (passed[..., None, :] - passed[:, :, rows, None] + write[..., None, :].double()).to(q.dtype)
    weights = exponent.masked_fill(columns > rows[:, None], -torch.inf).exp()
    weights = weights * (q[:, rows].transpose(1, 2) @ k.permute(0, 2, 3, 1))
    return weights / (weights.sum(-1).abs().clamp_min(1) + eps * largest.exp())[..., None]
