"""Graft attention by PyTorch's flex_attention: on a GPU, where FlashAttention does not serve and torch's own kernels would
store every score, which is what they do for masks of pairs and for values of another width.

On a GPU it is compiled, when it is first called. On a CPU it runs as it is, forward only, and only if it is asked for by name.
"""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.dispatch import Backend
from surgery.kernels.functions import learns, on_gpu, transformed

WIDEST = 256  # of queries, keys and values on a GPU, as FlashAttention's: blocks of wider ones may not fit its shared memory


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """As graft attention: q (b, pairs, t, w), k (b, pairs, s, w), v (b, pairs, s, dv); mask: None, boolean (b, s), or boolean
    (b, 1, t, s) with causality. Returns (b, pairs, t, dv). A query that may attend to nothing gives 0."""
    run = _compiled() if on_gpu(q) else _flex()
    t, s = q.shape[2], k.shape[2]
    blocks = _causal(t, s, str(q.device)) if mask is None else _blocks(_pairs(mask, s - t), len(q), t, s, q.device)
    return run(q, k, v, block_mask=blocks, scale=1.0)


def columns(w: int, dv: int) -> int:
    """Columns that it computes for every score on a GPU: it rounds both widths up to powers of two, 16 at least."""
    return sum(max(16, 1 << (width - 1).bit_length()) for width in (w, dv))


def refuses(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str | None:
    """Why `attend` cannot take such a call, or None."""
    return next(_objections(q, k, v, mask), None)


def _objections(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[str]:
    if reason := transformed():
        yield reason
    if not q.dtype == k.dtype == v.dtype:
        yield "it takes queries, keys and values of one dtype"
    if mask is not None and mask.dtype != torch.bool:
        yield "it takes boolean masks"
    if not on_gpu(q) and learns(q, k, v):
        yield "without a GPU it has no backward pass"
    if on_gpu(q) and q.dtype == torch.float64:
        yield "it takes float32, bfloat16 or float16"
    if on_gpu(q) and max(q.shape[-1], v.shape[-1]) > WIDEST:
        yield f"queries or values are wider than {WIDEST}"


def _declines(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    if not on_gpu(q):
        return "without a GPU it stores every score"
    if q.dtype == torch.float32:
        return "in float32 no tensor core helps it, and torch's kernels are better tuned"
    if q.shape[2] == 1:
        return "a single query has few scores to store"
    if mask is None and q.shape == k.shape == v.shape:
        return "torch's own kernels do not store the scores of such a call either"
    return None


def _pairs(mask: Tensor, shift: int) -> Callable[..., Any]:
    if mask.dim() == 4:
        return lambda b, h, i, j: mask[b, 0, i, j]
    return lambda b, h, i, j: (j <= i + shift) & mask[b, j]


@lru_cache(16)
def _causal(t: int, s: int, device: str) -> Any:
    return _blocks(lambda b, h, i, j: j <= i + (s - t), None, t, s, torch.device(device))


def _blocks(pairs: Callable[..., Any], b: int | None, t: int, s: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(pairs, b, None, t, s, device=device)


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # a second of imports

    return flex_attention


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_flex())


FLEX = Backend("flex", attend, refuses, _declines, probed=True, opaque=True)
