"""Attention for grafts: wide queries and keys, values of another width, and one query-key pair for many value heads.

    y_t = sum_{s <= t} softmax_s(q_t . k_s) v_s

The scale (tau) is already in q. Where `pairs` query-key pairs serve `heads` value heads, the values of a pair's heads are laid
side by side as one wide value, so that the scores are computed once per pair and nothing is copied per head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.attention_native import attend_native, declines_native, refuses_native
from surgery.kernels.dispatch import Backend, Operation
from surgery.kernels.flash_attention import BACKENDS as FLASH
from surgery.kernels.flex_attention import FLEX
from surgery.kernels.functions import in_forward_mode, seeded
from surgery.kernels.operators import Signature
from surgery.kernels.packing import Packing


def graft_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Packing | None = None, *, backend: str | None = None
) -> Tensor:
    """Causal attention of the last tokens on all of them.

    q (b, pairs, t, w); k (b, pairs, s, w) with s >= t; v (b, heads, s, p), heads a multiple of pairs: value head i uses pair
    i // (heads / pairs). mask: None, or boolean (b, s), True for keys that exist; both are causal, the queries aligned to the
    end of the keys. Or (b, 1, t, s), boolean (True: may attend) or additive, causality included; sdpa and the reference take
    both, flex the boolean one, and the other kernels neither. Or, where several documents share a row, the packing of the
    tokens, with s = t: each is causal on its own. A query that may attend to nothing gives 0. Returns (b, t, heads, p).
    """
    if isinstance(mask, Packing):
        time_first = (m.transpose(1, 2) for m in (q, k, v))
        return mask.apply(lambda *rows: graft_attention(*(m.transpose(1, 2) for m in rows), backend=backend), *time_first)
    b, heads, s, p = v.shape
    pairs, t = q.shape[1:3]
    if not b or not t:
        return v.new_zeros(b, t, heads, p)  # nothing; its shape alone
    wide = v.view(b, pairs, heads // pairs, s, p).transpose(2, 3).reshape(b, pairs, s, -1)
    y = GRAFT_ATTENTION(q, k, wide, mask, backend=backend)
    return y.view(b, pairs, t, heads // pairs, p).permute(0, 2, 1, 3, 4).reshape(b, t, heads, p)


def _expanded(mask: Tensor | None, t: int, s: int, device: torch.device) -> Tensor:
    """A mask of keys, or None, as a mask of pairs, causal; a mask of pairs as it is."""
    if mask is not None and mask.dim() == 4:
        return mask
    causal = torch.ones(t, s, dtype=torch.bool, device=device).tril(s - t)
    return causal if mask is None else causal & mask[:, None, None]


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    mask = _expanded(mask, q.shape[-2], k.shape[-2], q.device)
    scores = q @ k.transpose(-1, -2)
    scores = scores if mask.dtype == torch.bool else scores + mask
    # Filled even where the mask already added -inf: it keeps the NaN gradient of a row without keys away from q and k.
    scores = scores.masked_fill(~mask if mask.dtype == torch.bool else mask == -math.inf, -math.inf)
    return scores.softmax(-1).nan_to_num() @ v  # a row that may attend to nothing (left padding) is 0


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    t, s = q.shape[-2], k.shape[-2]
    if mask is not None or 1 < t < s:
        mask = _expanded(mask, t, s, q.device)
    w, dv = q.shape[-1], v.shape[-1]
    width = max(w, min(dv, 128))
    if t == 1 or w == dv or (dv > 4 * width and t * s < 2**26):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and t > 1, scale=1.0)
    # Where values are as wide as keys, torch's kernels never store the scores, which saves time as well: zeros make them so,
    # and a wide value is cut into pieces (but not many, for each computes the scores again).
    q, k, v = (F.pad(m, (0, more)).contiguous() for m, more in ((q, width - w), (k, width - w), (v, -dv % width)))
    pieces = v.split(width, dim=-1)
    y = [F.scaled_dot_product_attention(q, k, m, attn_mask=mask, is_causal=mask is None, scale=1.0) for m in pieces]
    return torch.cat(y, dim=-1)[..., :dv]


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    options = seeded()
    # Fewer queries than keys: early versions of FlashAttention align them to the beginning. More than a block of either.
    q, k, v = (torch.randn(1, 2, n, w, **options).to(device, dtype) for n, w in ((70, 24), (77, 24), (77, 48)))
    return q, k, v, None


# On GPUs FlashAttention first, where it wastes little (its `declines` says when), then flex_attention: torch's own kernels
# compute and store every score when the widths differ or queries are fewer than keys. On CPUs ours in C, which takes widths as
# they are. torch's serves the rest: float32 on GPUs, float64, values or queries too wide for the others, a few queries.
GRAFT_ATTENTION = Operation(
    "graft_attention",
    *FLASH,
    FLEX,
    Backend("native", attend_native, refuses_native, declines_native, probed=True, opaque=True),
    Backend("sdpa", _sdpa, in_forward_mode),
    Backend("reference", _reference),
    example=_example,
    signature=Signature(
        ("Tensor q", "Tensor k", "Tensor v", "Tensor? mask"),
        1,
        lambda q, k, v, mask: [((*q.shape[:3], v.shape[3]), q.dtype)],
    ),
)
