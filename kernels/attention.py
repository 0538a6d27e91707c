"""Causal attention of grafts: wide queries and keys, narrower values, a bias on every key and a null key.

    p_t = softmax([q_t . k_s + bias_s for s <= t, null]),    y_t = sum_s p_ts v_s,    m_t = sum_s p_ts = 1 - p_t,null

`triton` (attention_triton.py) is ours, for CUDA devices; it takes the bias as it is, leaves widths as they are and gives m.
`sdpa` brings the rest into a form that torch's kernels know, in which the scores are never stored: the bias becomes one more
dimension of queries (1) and keys (the bias), the null key one more key, before the first, with a query of its own that nobody
reads, and m the value of one more dimension, which is 1 at all keys but the null key. `plain` computes the scores of a few
queries at a time. An attention that has other software to itself (FlashAttention) would have to be asked for the same again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.attention_triton import attend_triton, not_for_triton
from surgery.kernels.choose import ON_GPU, Backend, Operation
from surgery.kernels.functions import in_forward_mode, on_gpu, own_precision

QUERIES = 256  # whose scores `plain` holds at once
FEW = 16  # queries up to which `plain` is the quickest: nothing has to be padded or copied
ABSENT = -3e4  # the bias of a key that does not exist, where -inf would be multiplied by 0 in a gradient; float16 has it


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    null: Tensor | None = None,
    mask: Tensor | None = None,
    packing: Any = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention beside a null key.

    q (b, h, t, w); k (b, h, s, w); v (b, h, s, p); query t sees the keys up to its own place, s - T + t. bias (b, h, s), or
    (b, 1, s) for all heads, -inf for a key that does not exist; null (h,), the null key's logit, or None for no such key; mask
    (b, s) bool, False for keys that do not exist; packing: of the tokens, where several documents share a row. A query that
    sees no key gives 0. Returns y (b, h, t, p) in the dtype of v, and m (b, h, t) in float32 at least, 1 without a null key.
    """
    if not q.numel() or not v.numel():
        work = torch.promote_types(v.dtype, torch.float32)
        return v.new_zeros(*q.shape[:3], v.shape[-1]), v.new_ones(q.shape[:3], dtype=work)
    if mask is not None and (bias is not None or packing is not None):
        bias, mask = torch.where(mask[:, None], q.new_zeros(()) if bias is None else bias, -torch.inf), None
    with own_precision(q):
        if packing is None:
            y, m = ATTEND(q, k, v, bias, null, mask, None, backend=backend)
        elif on_gpu(q) and ATTEND.takes_packed(q, k, v, bias, null, mask, packing.seq_idx, backend=backend):
            y, m = ATTEND(q, k, v, bias, null, mask, packing.seq_idx, backend=backend)
            y, m = (packing.clear(each.transpose(1, 2)).transpose(1, 2) for each in (y, m))
        else:

            def alone(*rows: Tensor) -> tuple[Tensor, ...]:
                q, k, v, *rest = (row.transpose(1, 2) for row in rows)
                y, m = attend(q, k, v, rest[0] if rest else None, null, backend=backend)
                return y.transpose(1, 2), m.transpose(1, 2)

            y, m = packing.apply(alone, *(x.transpose(1, 2) for x in (q, k, v, bias) if x is not None))
            y, m = y.transpose(1, 2), m.transpose(1, 2)
    return y, m if null is not None else torch.ones_like(m)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    null: Tensor | None,
    mask: Tensor | None,
    seq_idx: Tensor | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """window: how many keys a query sees at most, its own and those before; None: all."""
    (t, s), work = (q.shape[2], k.shape[2]), torch.promote_types(q.dtype, torch.float32)
    if mask is not None:
        absent = torch.zeros(mask.shape, dtype=work, device=mask.device).masked_fill(~mask, -torch.inf)[:, None]
        bias = absent if bias is None else bias + absent
    wide, parts = k.to(work), []
    for start in range(0, t, QUERIES):
        stop = min(start + QUERIES, t)
        seen = s - t + stop  # keys after those are not seen by any of these queries
        scores = q[:, :, start:stop].to(work) @ wide[:, :, :seen].mT
        scores = scores if bias is None else scores + bias[:, :, None, :seen].to(work)
        if stop - start > 1:
            later = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).triu(seen - stop + start + 1)
            scores = scores.masked_fill(later, -torch.inf)
        if window is not None:
            far = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).tril(seen - stop + start - window)
            scores = scores.masked_fill(far, -torch.inf)
        if seq_idx is not None:
            scores = scores.masked_fill((seq_idx[:, start:stop, None] != seq_idx[:, None, :seen])[:, None], -torch.inf)
        top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(work).min)
        none = torch.zeros_like(top)
        if null is not None:
            logit = null.to(work)[:, None, None]
            top = torch.maximum(top, logit.detach())
            none = (logit - top).exp()
        weights = (scores - top).exp()
        found = weights.sum(-1, keepdim=True)
        total = found + none
        total = total.masked_fill(total == 0, 1)
        parts.append(((weights / total).to(v.dtype) @ v[:, :, :seen], (found / total)[..., 0]))
    y, m = parts[0] if len(parts) == 1 else (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return y, m


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, null: Tensor | None, mask: Tensor | None, seq_idx: None
) -> tuple[Tensor, Tensor]:
    (b, h, t, w), p = q.shape, v.shape[3]
    alive = None
    if mask is not None:
        bias, alive = torch.zeros(b, 1, t, dtype=q.dtype, device=q.device).masked_fill(~mask[:, None], ABSENT), mask[:, None]
    elif bias is not None:
        alive = bias.detach() > ABSENT
        bias = bias.clamp_min(ABSENT)
    extra = int(null is not None)
    width = max(w + int(bias is not None or null is not None), p + extra)
    width += -width % 8  # torch's kernels on a GPU take nothing else, and those of a CPU take it faster
    if null is not None or width > w:
        q, k, v = _widened(q, k, v, bias, null, width)
    elif p < width:
        v = F.pad(v, (0, width - p))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    y = y[:, :, 1:] if extra else y
    m = y[..., p].to(torch.promote_types(y.dtype, torch.float32)) if extra else torch.ones_like(y[..., 0])
    y = y[..., :p]
    if alive is not None:  # a query before the first key would see all absent ones
        some = alive.cumsum(-1).expand(b, h, t) > 0
        y, m = y.masked_fill(~some[..., None], 0), m.masked_fill(~some, 0) if extra else m
    return y, m


def _widened(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, null: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as wide as `width`, with what the module's docstring says in their last dimensions."""
    (b, h, t, w), p = q.shape, v.shape[3]
    extra = int(null is not None)
    ones = q.new_ones(b, h, t, 1)
    parts = [q] if bias is None and null is None else [q, ones]
    q = F.pad(torch.cat(parts, -1), (0, width - w - len(parts) + 1, extra, 0))
    if bias is not None or null is not None:
        column = torch.zeros_like(ones[..., 0]) if bias is None else bias.to(k.dtype).expand(b, h, t)
        k = torch.cat([k, column[..., None]], -1)
    k = F.pad(k, (0, width - k.shape[-1], extra, 0))
    v = F.pad(torch.cat([v, ones.to(v.dtype)], -1) if extra else v, (0, width - p - extra, extra, 0))
    if null is not None:
        first = F.one_hot(torch.tensor(w, device=k.device), width).to(k.dtype) * null.to(k.dtype)[:, None]
        k = torch.cat([first[:, None].expand(b, h, 1, width), k[:, :, 1:]], 2)
    return q, k, v


def _not_for_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Any, null: Any, mask: Any, seq_idx: Any) -> str | None:
    if seq_idx is not None:
        return "it takes one document a row"
    if q.shape[2] != k.shape[2]:
        return "it takes as many queries as keys"
    if q.shape[2] <= FEW:
        return "a few queries are quicker without it"
    if not q.dtype == k.dtype == v.dtype:
        return "it takes queries, keys and values of one dtype"
    return in_forward_mode()


ATTEND = Operation(
    "attend",
    "q:bhtw k:bhsw v:bhsp bias?:bis null?:h- mask?:bs& seq_idx?:bt#",
    lambda q, k, v, *rest: [
        ((*q.shape[:3], v.shape[3]), v.dtype),
        (q.shape[:3], torch.promote_types(v.dtype, torch.float32)),
    ],
    2,
    Backend("triton", attend_triton, not_for_triton, **ON_GPU),
    Backend("sdpa", _sdpa, _not_for_sdpa),
    Backend("plain", attend_plain),
)
