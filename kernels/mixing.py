"""Exact causal mixing matrices: the operator M of one head, y = M x, written out.

These are for looking at heads and for checking the scan against, not for running models: M costs rows x t numbers a head,
so ask for the heads and rows that are needed. Matrices are computed in float32 at least, and differentiable.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def ssd_matrix(
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    heads: Sequence[int] | None = None,
    rows: Tensor | None = None,
    time_step: bool = True,
    D: Tensor | None = None,
) -> Tensor:
    """The matrix of a Mamba-2 head, M = L o (C B^T) with L 1-semiseparable (Mamba-2, arXiv 2405.21060, section 5; the scan of
    its section 6 multiplies by M without writing it out):

        M_ij = exp(A (dt_{j+1} + ... + dt_i)) (C_i . B_j) dt_j    for j <= i, and 0 above the diagonal

    dt (b, t, h), ready for use; A (h,), negative; B and C (b, t, g, n) with h a multiple of g; D (h,).
    Returns (b, len(heads), len(rows), t): all heads and all rows where None, else the chosen ones in the order given.

    The time step dt_j is included unless `time_step` is False, so that M acts on x (True) or on dt x (False). The skip D is
    included, on the diagonal, only if it is given. Then M x is ssd_scan's y from an empty state.
    """
    t, h = dt.shape[1:]
    work = torch.promote_types(dt.dtype, torch.float32)
    chosen = [range(h)[i] for i in (range(h) if heads is None else heads)]
    columns = torch.arange(t, device=dt.device)
    rows = columns if rows is None else columns[rows.to(dt.device)]
    groups = [head // (h // B.shape[2]) for head in chosen]
    used = sorted(set(groups))
    B, C = (m[:, :, used].transpose(1, 2).to(work) for m in (B, C))  # b used t n
    scores = C[:, :, rows] @ B.transpose(-1, -2)  # once per group, as heads of a group share them
    dt = dt[:, :, chosen].transpose(1, 2).to(work)  # b heads t
    # In float64: the sum over a long context is large, and its error would become a relative error of M.
    log_decay = (dt.double() * A[chosen, None].double()).cumsum(-1)
    exponent = (log_decay[:, :, rows, None] - log_decay[:, :, None, :]).to(work)
    # Masked before exp, not after: above the diagonal the exponent is positive and exp could overflow.
    M = exponent.masked_fill(columns > rows[:, None], -torch.inf).exp() * scores[:, [used.index(g) for g in groups]]
    if time_step:
        M = M * dt[:, :, None]
    if D is not None:
        M = M + D[chosen, None, None].to(work) * (columns == rows[:, None])
    return M


def selective_matrix(
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    channels: Sequence[int] | None = None,
    rows: Tensor | None = None,
    time_step: bool = True,
    D: Tensor | None = None,
) -> Tensor:
    """The matrix of a Mamba-1 channel (arXiv 2312.00752, equation 2, written out over time):

        M_ij = sum_n C_in exp(A_n (dt_{j+1} + ... + dt_i)) B_jn dt_j    for j <= i, and 0 above the diagonal

    dt (b, t, d), ready for use; A (d, n), negative; B and C (b, t, n); D (d,). Returns (b, len(channels), len(rows), t);
    the rest as in `ssd_matrix`. A channel at a time, so that what is held at once is (b, rows, t, n).
    """
    t, d = dt.shape[1:]
    work = torch.promote_types(dt.dtype, torch.float32)
    chosen = [range(d)[i] for i in (range(d) if channels is None else channels)]
    columns = torch.arange(t, device=dt.device)
    rows = columns if rows is None else columns[rows.to(dt.device)]
    above = columns > rows[:, None]
    B, C = B.to(work), C[:, rows].to(work)
    matrices = []
    for channel in chosen:
        step = dt[..., channel].to(work)
        passed = step.double().cumsum(-1)
        # Clamped because above the diagonal the difference is negative, and exp of it times A could overflow.
        between = (passed[:, rows, None] - passed[:, None, :]).to(work).clamp_min(0)
        M = torch.einsum("bin,bjn,bijn->bij", C, B, (between[..., None] * A[channel].to(work)).exp()).masked_fill(above, 0)
        matrices.append(M * step[:, None] if time_step else M)
    M = torch.stack(matrices, 1)
    return M if D is None else M + D[chosen, None, None].to(work) * (columns == rows[:, None])


def attention_matrix(q: Tensor, k: Tensor, *, rows: Tensor | None = None) -> Tensor:
    """The matrix of causal softmax attention, M_ij = softmax_j(q_i . k_j) over the keys that query i may see.

    q (b, pairs, t, w), already scaled; k (b, pairs, s, w) with s >= t: the queries are the last t tokens. `rows` index the
    queries. Returns (b, pairs, len(rows), s); every row sums to 1. A dual graft has neither time step nor decay in it, and
    the skip D is not included.
    """
    t, s = q.shape[2], k.shape[2]
    work = torch.promote_types(q.dtype, torch.float32)
    columns = torch.arange(s, device=q.device)
    rows = columns[:t] if rows is None else columns[:t][rows.to(q.device)]
    scores = q[:, :, rows].to(work) @ k.to(work).transpose(-1, -2)
    return scores.masked_fill(columns > (rows + s - t)[:, None], -torch.inf).softmax(-1)
