"""Attention for grafts: wide queries and keys, values of another width, and one query-key pair for many value heads.

    y_t = sum_{s <= t} softmax_s(q_t . k_s) v_s

The scale (tau) is already in q. Where `pairs` query-key pairs serve `heads` value heads, the values of a pair's heads are laid
side by side as one wide value, so that the scores are computed once per pair and nothing is copied per head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.dispatch import Backend, Operation


def graft_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Causal attention of the last tokens on all of them.

    q (b, pairs, t, w); k (b, pairs, s, w) with s >= t; v (b, heads, s, p), heads a multiple of pairs: value head i uses pair
    i // (heads / pairs). mask (b, 1, t, s), boolean (True: may attend) or additive; None means causal, with the queries
    aligned to the end of the keys. Returns (b, t, heads, p).
    """
    b, heads, s, p = v.shape
    pairs, t = q.shape[1:3]
    wide = v.view(b, pairs, heads // pairs, s, p).transpose(2, 3).reshape(b, pairs, s, -1)
    y = GRAFT_ATTENTION(q, k, wide, mask, backend=backend)
    return y.view(b, pairs, t, heads // pairs, p).permute(0, 2, 1, 3, 4).reshape(b, t, heads, p)


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    t, s = q.shape[-2], k.shape[-2]
    if mask is None:
        mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    scores = q @ k.transpose(-1, -2)
    scores = scores if mask.dtype == torch.bool else scores + mask
    # Filled even where the mask already added -inf: it keeps the NaN gradient of a row without keys away from q and k.
    scores = scores.masked_fill(~mask if mask.dtype == torch.bool else mask == -math.inf, -math.inf)
    return scores.softmax(-1).nan_to_num() @ v  # a row that may attend to nothing (left padding) is 0


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    t, s = q.shape[-2], k.shape[-2]
    if mask is None and 1 < t < s:
        mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and t > 1, scale=1.0)


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, w, generator=g).to(device, dtype) for w in (24, 24, 48))
    return q, k, v, None


GRAFT_ATTENTION = Operation("graft_attention", Backend("sdpa", _sdpa), Backend("reference", _reference), example=_example)
