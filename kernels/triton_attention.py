"""Graft attention in Triton, for GPUs (the kernels and their mathematics: triton_attention_kernels.py).

With TRITON_INTERPRET=1, read when the kernels are loaded, it runs on a CPU, slowly.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import capability, transformed, without_autocast
from surgery.kernels.triton_attention_kernels import backward_keys, backward_queries, forward, triton

Tile = tuple[int, int, int, int]  # queries and keys of a program's block (BM, BN), warps, pipeline stages
INTERPRETED = triton is not None and not isinstance(forward, triton.JITFunction)
WIDEST = 272  # of queries and keys: 256 and a bit
SHORT = 4 if INTERPRETED else 32  # up to so many queries is decoding: few programs, and the keys are worth reading only once


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """q (b, pairs, t, w), k (b, pairs, s, w) and v (b, pairs, s, dv), with any strides; mask (b, s), boolean: which keys exist,
    or None -> (b, pairs, t, dv). Causal, the queries aligned to the end of the keys. Differentiable."""
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter's products are silently wrong in bfloat16
        return attend(q.float(), k.float(), v.float(), mask).bfloat16()
    if q.shape[2] > SHORT and (odd := -q.shape[-1] % 8):
        # Rows of 129 numbers start anywhere, which forbids wide and asynchronous loads; a copy is linear in the length.
        q, k = F.pad(q, (0, odd)), F.pad(k, (0, odd))
    return _Attend.apply(q, k, v, mask)


def refuses(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str | None:
    """Why `attend` cannot take such a call, or None."""
    return next(_objections(q, k, v, mask), None)


def _objections(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[str]:
    if triton is None:
        yield "Triton is not installed"
    if reason := transformed():
        yield reason
    if q.device.type != "cuda" and not (INTERPRETED and q.device.type == "cpu"):
        yield "it needs a GPU (or TRITON_INTERPRET=1 in the environment before Python starts)"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        yield "it takes float32, bfloat16 or float16, the same for queries, keys and values"
    if mask is not None and (mask.dim() != 2 or mask.dtype != torch.bool):
        yield "its mask says which keys exist: boolean, (batch, keys)"
    if q.shape[-1] > WIDEST:
        yield f"queries and keys are wider than {WIDEST}"
    if not 0 < q.shape[2] <= k.shape[2]:
        yield "it needs a query, and a key for every query"
    if q.device.type == "cuda" and torch.version.hip is None and capability(q.device) < (8, 0):
        yield "it needs compute capability 8.0"


@cache
def blocks(w: int, dv: int, most: int = 256) -> tuple[int, int, int]:
    """W1 and W2, the tiles of queries and keys, and the block of values, at most `most`: what computes the fewest columns."""
    w1 = max(16, 1 << (w.bit_length() - 1))
    w2 = 0 if w <= w1 else max(16, 1 << (w - w1 - 1).bit_length())
    if w1 == w2 or w1 + w2 >= 2 * w1:
        w1, w2 = 2 * w1, 0
    sizes = [bv for bv in (16, 32, 64, 128, 256) if bv <= most]
    return w1, w2, min(sizes, key=lambda bv: (_cdiv(dv, bv) * (w1 + w2 + bv), bv))


class _Attend(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        o, lse = _attend(q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, o, lse)
        return o

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, o, lse = ctx.saved_tensors
        (b, pairs, t, w), s, dv = q.shape, k.shape[2], v.shape[3]
        w1, w2, bv = blocks(w, dv, _most(q, 128))
        strides, constants = _common(q, k, v, mask, w1, w2, bv)
        dq, dk, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        delta = torch.empty_like(lse)
        exists = None if mask is None else mask.view(torch.uint8)
        strides += do.stride()
        with torch.cuda.device_of(q):
            arguments = (q, k, v, exists, o, do, lse, delta, dq, *strides, *o.stride()[:3], pairs, t, s)
            _launch(backward_queries, _tiles("queries", q), lambda n: (_cdiv(t, n["BM"]) * b * pairs,), arguments, constants)
            arguments = (q, k, v, exists, do, lse, delta, dk, d_v, *strides, pairs, t, s)
            launches = [(True, True, 1)] if dv <= bv else [(True, False, 1), (False, True, _cdiv(dv, bv))]
            for keys, values, columns in launches:
                _launch(
                    backward_keys,
                    _tiles("keys", q),
                    lambda n, columns=columns: (_cdiv(s, n["BN"]) * b * pairs, columns),
                    arguments,
                    constants | {"KEYS": keys, "VALUES": values},
                )
        return dq, dk, d_v, None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """o, and lse (b, pairs, t) in powers of two."""
    (b, pairs, t, w), s, dv = q.shape, k.shape[2], v.shape[3]
    w1, w2, bv = blocks(w, dv, _most(q, 256))
    strides, constants = _common(q, k, v, mask, w1, w2, bv)
    tiles, span = _tiles("short" if t <= SHORT else "forward", q), s
    if t <= SHORT:  # too few programs for the GPU: each takes a span of the keys, and the spans are joined
        bm, bn = tiles[0][:2]
        programs = _cdiv(t, bm) * b * pairs * _cdiv(dv, bv)
        spans = 2 if INTERPRETED else min(2 * _processors(q.device) // programs, _cdiv(s, 256))
        span = _cdiv(_cdiv(s, max(1, spans)), bn) * bn
    spans = _cdiv(s, span)
    # Laid out (b, t, pairs, dv), which is how the caller wants it.
    o = torch.empty(spans, b, t, pairs, dv, dtype=q.dtype if spans == 1 else torch.float32, device=q.device).transpose(2, 3)
    lse = torch.empty(spans, b, pairs, t, dtype=torch.float32, device=q.device)
    exists = None if mask is None else mask.view(torch.uint8)
    arguments = (q, k, v, exists, o, lse, *strides, *o.stride()[:4], pairs, t, s, span)
    with torch.cuda.device_of(q):
        _launch(forward, tiles, lambda n: (_cdiv(t, n["BM"]) * b * pairs, _cdiv(dv, bv), spans), arguments, constants)
    if spans == 1:
        return o[0], lse[0]
    lse *= math.log(2)
    weights = lse.softmax(0).nan_to_num()  # of each span
    return (o * weights[..., None]).sum(0).to(q.dtype), lse.logsumexp(0) / math.log(2)


def _common(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, w1: int, w2: int, bv: int) -> tuple[tuple, dict]:
    strides = (*q.stride(), *k.stride(), *v.stride(), *((0, 0) if mask is None else mask.stride()))
    return strides, {
        "W": q.shape[-1], "W1": w1, "W2": w2, "DV": v.shape[-1], "BV": bv, "HOLES": mask is not None,
        "LONG": q.shape[2] > 1024,
    }  # fmt: skip


def _launch(kernel: Any, tiles: tuple[Tile, ...], grid: Any, arguments: tuple, constants: dict) -> None:
    if len(tiles) == 1:
        ((bm, bn, warps, stages),) = tiles
        kernel[grid](*arguments, **constants, BM=bm, BN=bn, num_warps=warps, num_stages=stages)
    else:
        _tuned(kernel, tiles)[grid](*arguments, **constants)


@cache
def _tuned(kernel: Any, tiles: tuple[Tile, ...]) -> Any:
    """The kernel with the fastest of the tiles, measured on the first call of each kind."""
    configs = [triton.Config({"BM": bm, "BN": bn}, num_warps=warps, num_stages=n) for bm, bn, warps, n in tiles]
    return triton.autotune(configs, key=[name for name in ("W", "DV", "LONG", "KEYS") if name in kernel.arg_names])(kernel)


def _tiles(kernel: str, q: Tensor) -> tuple[Tile, ...]:
    """What to try. The last of each fits the shared memory of any GPU since compute capability 8.0."""
    if INTERPRETED:
        return ((16, 16, 1, 1),)
    if q.dtype == torch.float32:
        return ((16, 32, 4, 2),) if kernel == "short" else ((32, 32, 8, 1), (32, 32, 4, 1))
    if kernel == "short":
        return ((16, 64, 4, 2),)
    return {
        "forward": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)),
        "queries": ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)),
        "keys": ((64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
    }[kernel]


def _most(q: Tensor, most: int) -> int:
    return 16 if INTERPRETED else min(most, 64) if q.dtype == torch.float32 else most


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
