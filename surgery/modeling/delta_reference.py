"""The gated delta rule in plain PyTorch. It travels with an exported folder and serves where this package is not installed.

    S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T,    y_t = S_t^T q_t / sqrt(n),    a_t = exp(log_decay_t)

with queries and keys scaled to length 1. Chunk by chunk (arXiv 2406.06484, section 3; decay as in arXiv 2412.06464, section
3.3): let u_t be beta_t times the change v_t - (diag(a_t) S_{t-1})^T k_t, A_t the sum of log_decay over the chunk's tokens up to
t, and S the state that enters the chunk. Then

    u_t + beta_t sum_{s<t} (k_t . exp(A_t - A_s) k_s) u_s = beta_t (v_t - S^T exp(A_t) k_t)

is a triangular system of as many equations as the chunk has tokens.
"""

from typing import Any

import torch
from torch import Tensor

from .reference import at_least_float32, own_precision, result_dtype

CHUNK = 16  # tokens that are solved for at once
EPS = 1e-6  # of the squared length of queries and keys, as in transformers


def unit(m: Tensor) -> Tensor:
    """m (..., n) scaled to length 1, in float32 at least."""
    m = at_least_float32(m)
    return m * torch.rsqrt((m * m).sum(-1, keepdim=True) + EPS)


@own_precision
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    packing: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """The scan of a sequence.

    q and k (b, t, g, n), of any length; v (b, t, h, p), h a multiple of g; log_decay (b, t, h), or (b, t, h, n) for one a
    channel, at most 0; beta (b, t, h), 0 where nothing is written; initial_state (b, h, n, p). Returns y (b, t, h, p) and the
    state after the last token, in float32 at least (None with packing).
    """
    if packing is not None:
        return packing.apply(lambda q, k, v, a, beta: delta_rule(q, k, v, a, beta)[0], q, k, v, log_decay, beta), None
    (b, t, h, p), n, dtype = v.shape, k.shape[-1], result_dtype(v)
    log_decay = log_decay[..., None] if log_decay.dim() == beta.dim() else log_decay
    rows = (unit(q) * n**-0.5, unit(k), v, log_decay, beta[..., None])  # to (b, h, t, channels), in float32 at least
    q, k, v, decay, beta = (at_least_float32(m).transpose(1, 2).repeat_interleave(h // m.shape[2], 1) for m in rows)
    state = v.new_zeros(b, h, n, p) if initial_state is None else initial_state.to(v.dtype)
    parts = []
    for start in range(0, t, CHUNK):
        queries, keys, values, a, rate = (m[:, :, start : start + CHUNK] for m in (q, k, v, decay, beta))
        a = a.cumsum(-2)
        # Where s > t the exponent is positive, and exp could overflow; there the products are not used.
        between = (a[..., :, None, :] - a[..., None, :, :]).clamp(max=0).exp()
        own, read = ((m[..., :, None, :] * between * keys[..., None, :, :]).sum(-1) for m in (keys, queries))
        right = (values - keys * a.exp() @ state) * rate
        change = torch.linalg.solve_triangular((own * rate).tril(-1), right, upper=False, unitriangular=True)
        parts.append(queries * a.exp() @ state + read.tril() @ change)
        last = a[..., -1:, :]
        state = last.exp().mT * state + (keys * (last - a).exp()).mT @ change
    y = torch.cat(parts, 2).transpose(1, 2) if parts else v.transpose(1, 2)
    return y.to(dtype), state


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One token. Updates `state` (b, h, n, p) in place and returns y (b, h, p); q and k (b, g, n), v (b, h, p), log_decay (b,
    h) or (b, h, n), beta (b, h)."""
    y, new = delta_rule(q[:, None], k[:, None], v[:, None], log_decay[:, None], beta[:, None], state)
    state.copy_(new)  # type: ignore[arg-type]
    return y[:, 0]
