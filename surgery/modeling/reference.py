"""The operations of hybrids in plain PyTorch. They travel with an exported folder and serve where this package is not
installed.

With it, `surgery.kernels` has the same functions, with the same arguments, on faster kernels. Sums run in float32 at least.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens whose mixing is one matrix product
QUERIES = 512  # queries whose scores are held at once
Operation = TypeVar("Operation", bound=Callable[..., Any])


def own_precision(operation: Operation) -> Operation:
    """Decorates an operation that chooses its precision itself: autocast is off within."""

    @wraps(operation)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = x.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return operation(x, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return operation(x, *args, **kwargs)

    return cast(Operation, run)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a scan's result: that of x, but float32 for float16, whose range a long sum soon exceeds."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool = False, *, packing: Any = None) -> Tensor:
    """The short causal convolution of a mixer, channel by channel: the last t tokens' outputs, (b, t, c).

    x (b, s, c), s >= t: tokens before the last t are context. weight (c, 1, taps), as in Conv1d; bias (c,). silu: whether that
    activation follows. packing: of the tokens, where several documents share a row; then s = t.
    """
    if packing is not None:
        return packing.apply(lambda rows: causal_conv(rows, weight, bias, rows.shape[1], silu), x)
    padded = F.pad(x.to(weight.dtype).transpose(1, 2), (weight.shape[-1] - 1, 0))
    y = F.conv1d(padded, weight, bias, groups=len(weight))[..., x.shape[1] - t :].transpose(1, 2)
    return (F.silu(y) if silu else y).to(x.dtype)


@own_precision
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
) -> tuple[Tensor, Tensor | None]:
    """The scan of Mamba-2, S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t (arXiv 2405.21060, section 6).

    x (b, t, h, p); dt (b, t, h), ready for use, 0 where nothing happens; A (h,), negative; B and C (b, t, g, n), h a multiple
    of g; D (h,); initial_state (b, h, p, n). Returns y (b, t, h, p) and the state after the last token (None with packing).
    chunk_size is the checkpoint's; the result does not depend on it.
    """
    if packing is not None:
        return packing.apply(lambda x, dt, B, C: ssd_scan(x, dt, A, B, C, D)[0], x, dt, B, C), None
    (b, t, h, p), (g, n), dtype = x.shape, B.shape[2:], result_dtype(x)
    x, dt, A, B, C = (at_least_float32(m) for m in (x, dt, A, B, C))
    B, C = (m.transpose(1, 2).repeat_interleave(h // g, 1, output_size=h) for m in (B, C))  # b h t n
    decay, written = (dt * A).transpose(1, 2), (x * dt[..., None]).transpose(1, 2)
    state = x.new_zeros(b, h, p, n) if initial_state is None else initial_state.to(x.dtype)
    parts = []
    for start in range(0, t, CHUNK):
        a, v, k, q = (m[:, :, start : start + CHUNK] for m in (decay, written, B, C))
        a = a.cumsum(-1)
        later = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        between = (a[..., :, None] - a[..., None, :]).masked_fill(later, -torch.inf).exp()
        parts.append((q @ k.mT * between) @ v + a.exp()[..., None] * (q @ state.mT))
        to_end = (a[..., -1:] - a).exp()
        state = a[..., -1, None, None].exp() * state + (v * to_end[..., None]).mT @ k
    y = torch.cat(parts, 2).transpose(1, 2) if parts else x
    return (y if D is None else y + D[:, None] * x).to(dtype), state


def ssd_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None) -> Tensor:
    """One token of ssd_scan. Updates `state` (b, h, p, n) in place and returns y (b, h, p).

    x (b, h, p); dt (b, h); A (h,); B and C (b, g, n); D (h,).
    """
    dtype = result_dtype(x)
    x, dt, A, B, C = (at_least_float32(m) for m in (x, dt, A, B, C))
    B, C = (m.repeat_interleave(x.shape[1] // m.shape[1], 1, output_size=x.shape[1]) for m in (B, C))
    new = torch.exp(A * dt)[..., None, None] * state + (dt[..., None] * x)[..., None] * B[:, :, None]
    state.copy_(new)
    y = (new @ C[..., None])[..., 0]
    return (y if D is None else y + D[:, None] * x).to(dtype)


@own_precision
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
) -> tuple[Tensor, Tensor | None]:
    """The scan of Mamba-1, S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t, y_t = S_t C_t + D x_t for each channel (arXiv 2312.00752,
    equation 2).

    x and dt (b, t, d), dt ready for use, 0 where nothing happens; A (d, n), negative; B and C (b, t, n); D (d,);
    initial_state (b, d, n). Returns y (b, t, d) and the state after the last token (None with packing).
    """
    if packing is not None:
        return packing.apply(lambda x, dt, B, C: selective_scan(x, dt, A, B, C, D)[0], x, dt, B, C), None
    dtype, state = result_dtype(x), initial_state
    x, dt, A, B, C = (at_least_float32(m) for m in (x, dt, A, B, C))
    state = x.new_zeros(len(x), *A.shape) if state is None else state.to(x.dtype)
    parts = []
    for t in range(x.shape[1]):
        state = torch.exp(A * dt[:, t, :, None]) * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        parts.append((state @ C[:, t, :, None])[..., 0])
    y = torch.stack(parts, 1) if parts else x
    return (y if D is None else y + D * x).to(dtype), state


def selective_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None) -> Tensor:
    """One token of selective_scan. Updates `state` (b, d, n) in place and returns y (b, d).

    x and dt (b, d); A (d, n); B and C (b, n); D (d,).
    """
    y, new = selective_scan(x[:, None], dt[:, None], A, B[:, None], C[:, None], D, state)
    state.copy_(new)  # type: ignore[arg-type]
    return y[:, 0]


@own_precision
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    null: Tensor | None = None,
    mask: Tensor | None = None,
    packing: Any = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention beside a null key, p = softmax([q_t . k_s + bias_s, null]).

    q (b, h, t, w); k (b, h, s, w); v (b, h, s, p); query t sees the keys up to its own place, s - T + t. bias (b, h, s), or
    (b, 1, s) for all heads, -inf for a key that does not exist; null (h,), the null key's logit, or None for no such key; mask
    (b, s) bool, False for keys that do not exist; packing: of the tokens, where several documents share a row. A query that
    sees no key gives 0. Returns y = sum_s p_s v_s (b, h, t, p) in the dtype of v, and m = 1 - p_null (b, h, t), 1 without a
    null key.
    """
    if packing is not None:

        def alone(*rows: Tensor) -> tuple[Tensor, ...]:
            q, k, v, *rest = (row.transpose(1, 2) for row in rows)
            return tuple(each.transpose(1, 2) for each in attend(q, k, v, rest[0] if rest else None, null))

        y, m = packing.apply(alone, *(x.transpose(1, 2) for x in (q, k, v, bias) if x is not None))
        return y.transpose(1, 2), m.transpose(1, 2)
    (b, h, t, _), s = q.shape, k.shape[2]
    allowed = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    if mask is not None:
        allowed = allowed & mask[:, None, None]
    keys, values = at_least_float32(k).mT, at_least_float32(v)
    floor = torch.finfo(keys.dtype).min
    parts = []
    for start in range(0, t, QUERIES):
        scores = at_least_float32(q[:, :, start : start + QUERIES]) @ keys
        scores = scores if bias is None else scores + bias[:, :, None].to(scores.dtype)
        scores = scores.masked_fill(~allowed[..., start : start + QUERIES, :], -torch.inf)
        top = scores.detach().amax(-1, keepdim=True).clamp_min(floor)
        none = torch.zeros_like(top)
        if null is not None:
            logit = null.to(scores.dtype)[:, None, None]
            top = torch.maximum(top, logit.detach())
            none = (logit - top).exp()
        weights = (scores - top).exp()
        found = weights.sum(-1, keepdim=True)
        total = found + none
        m = torch.ones_like(found) if null is None else found / total
        parts.append((weights @ values / total.masked_fill(total == 0, 1), m))
    if not parts:
        return v.new_zeros(b, h, 0, v.shape[-1]), values.new_ones(b, h, 0)
    y, m = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return y.to(v.dtype), m[..., 0]
