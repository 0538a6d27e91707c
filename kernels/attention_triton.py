"""Attention of grafts in Triton, for CUDA devices: forward and backward pass, in tiles, without a score in memory
(FlashAttention-2, arXiv 2307.08691), with what a graft needs beside it: a bias on every key, a null key, and documents.

The forward pass keeps L_t, the logarithm of the softmax's denominator, null key included. With p_ts = exp(q_t . k_s + bias_s -
L_t) and c_t = dm_t - (dy_t . y_t + dm_t m_t), where dm_t is the gradient by m_t = sum_s p_ts,

    dscore_ts = p_ts (dy_t . v_s + c_t),    dbias_s = sum_t dscore_ts,    dnull = sum_t exp(null - L_t) (c_t - dm_t)

Documents are runs of tokens, so a query sees the keys from `first` on, where its document begins.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import is_exact, on_gpu, transformed

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

    class tl:  # type: ignore[no-redef]  # what the kernels' signatures name
        constexpr = int


WIDEST = 256  # of queries and keys; values are taken in pieces
PIECE = 128  # columns of a value
UNSPECIFIC = ["H", "T", "S", "W", "P"]  # for whose values no kernel is compiled anew
SHARED = 101_376  # bytes that a block may have where nothing says more: RTX 30, 40 and 50, A10, A6000
# (queries, keys, warps, stages) of a tile, the fastest first (recipes/evidence/gpu).
TILES = ((128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))


def not_for_triton(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> str | None:
    """Why `attend_triton` does not take such a call, or None."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return "it takes float32, bfloat16 or float16, queries, keys and values alike"
    if q.shape[3] > WIDEST:
        return f"queries are wider than {WIDEST}"
    if q.shape[2] < 16:
        return "a few queries are quicker without it"
    if max(m.shape[2] * max(m.stride(2), m.shape[1] * m.shape[3]) for m in (q, k, v)) >= 2**31:
        return "rows are so long that offsets would need more than 32 bits"
    return transformed() or (None if triton is not None else "Triton is not installed")


def attend_triton(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, null: Tensor | None, mask: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as of ATTEND (attention.py)."""
    (b, h), s, p = q.shape[:2], k.shape[2], v.shape[3]
    if mask is not None:
        absent = torch.zeros(b, 1, s, dtype=torch.float32, device=q.device).masked_fill(~mask[:, None], -math.inf)
        bias = absent if bias is None else bias + absent
    bias = None if bias is None else bias.float()
    null = None if null is None else null.float()
    first = last = None
    if seq_idx is not None:
        first, last = _bounds(seq_idx)
    q, k, v = (m if m.stride(-1) == 1 else m.contiguous() for m in (q, k, v))
    if p <= PIECE:
        return _Attend.apply(q, k, v, bias, null, first, last)
    n = -(-p // PIECE)  # pieces of a value become heads with the same query and key
    pieces = F.pad(v, (0, n * PIECE - p)).unflatten(-1, (n, PIECE)).permute(0, 1, 3, 2, 4).flatten(1, 2)
    q, k = (m[:, :, None].expand(-1, -1, n, -1, -1).flatten(1, 2) for m in (q, k))
    bias = bias if bias is None or bias.shape[1] == 1 else bias.repeat_interleave(n, 1)
    null = None if null is None else null.repeat_interleave(n)
    y, m = _Attend.apply(q, k, pieces.contiguous(), bias, null, first, last)
    y = y.unflatten(1, (h, n)).permute(0, 1, 3, 2, 4).flatten(3)[..., :p]
    return y, m.unflatten(1, (h, n))[:, :, 0]


def _bounds(seq_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Of every token (b, t), where its document begins and where the next one does, int32."""
    t = seq_idx.shape[1]
    at = torch.arange(t, dtype=torch.int32, device=seq_idx.device).expand_as(seq_idx)
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    first = torch.where(begins, at, 0).cummax(1).values
    ends = F.pad(begins[:, 1:], (0, 1), value=True)
    last = torch.where(ends, at + 1, t).flip(1).cummin(1).values.flip(1)
    return first.int().contiguous(), last.int().contiguous()


@cache
def _shared_memory(device: torch.device) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


def tile(w: int, p: int, itemsize: int, shared: int, backward: bool) -> tuple[int, int, int, int]:
    """The first of TILES whose operands fit a block's shared memory. Forward a block holds its queries, and keys and values of
    as many steps as there are stages; backward queries and gradients stand beside keys and values, and scores between."""
    for queries, keys, warps, stages in TILES:
        if backward and queries > 64:
            continue
        own, moving = (keys, queries) if backward else (queries, keys)
        held = own * (w + p if backward else w) + stages * moving * (w + p)
        held += queries * keys * (2 if backward else 1)
        if held * itemsize <= shared * 0.9:
            return queries, keys, warps, stages
    return TILES[-1]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, bias, null, first, last):
        b, h, t, _ = q.shape
        y = torch.empty(b, t, h, v.shape[3], dtype=v.dtype, device=v.device).transpose(1, 2)
        m, total = (torch.empty(b, h, t, dtype=torch.float32, device=q.device) for _ in range(2))
        _launch(_forward_kernel, t, False, q, k, v, bias, null, first, last, y, m, total)
        ctx.save_for_backward(q, k, v, bias, null, first, last, y, m, total)
        return y, m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy, dm):
        q, k, v, bias, null, first, last, y, m, total = ctx.saved_tensors
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        c = dm - ((dy.float() * y.float()).sum(-1) + dm * m)
        c = c.contiguous()
        dq, dk, dv = (torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in (q, k, v))
        dbias = torch.empty(*k.shape[:3], dtype=torch.float32, device=k.device)
        _launch(_key_kernel, k.shape[2], True, q, k, v, bias, None, first, last, dy, c, total, dk, dv, dbias)
        _launch(_query_kernel, q.shape[2], True, q, k, v, bias, None, first, last, dy, c, total, dq)
        dnull = None
        if null is not None:
            dnull = ((null[:, None] - total).exp() * (c - dm)).sum((0, 2))
        if bias is not None and bias.shape[1] == 1:
            dbias = dbias.sum(1, keepdim=True)
        return dq, dk, dv, None if bias is None else dbias, dnull, None, None


def _launch(kernel: Any, tokens: int, backward: bool, q, k, v, bias, null, first, last, *rest: Tensor) -> None:
    """Run a kernel for blocks of `tokens` of every head."""
    (b, h, t, w), s, p = q.shape, k.shape[2], v.shape[3]
    wide, narrow = max(16, triton.next_power_of_2(w)), max(16, triton.next_power_of_2(p))
    shared = _shared_memory(q.device) if on_gpu(q) else SHARED
    queries, keys, warps, stages = tile(wide, narrow, q.element_size(), shared, backward)
    block = keys if kernel is _key_kernel else queries
    bias = bias if bias is None or bias.stride(2) == 1 else bias.contiguous()
    bias_strides = (0, 0) if bias is None else (bias.stride(0), bias.stride(1) if bias.shape[1] > 1 else 0)
    strides = [n for m in (q, k, v, rest[0]) for n in m.stride()[:3]]
    exact = "ieee" if is_exact(q) else "tf32"
    with torch.cuda.device(q.device) if on_gpu(q) else nullcontext():  # Triton launches on the current device
        kernel[(triton.cdiv(tokens, block), b * h)](
            q, k, v, bias, null, first, last, *rest, *strides, *bias_strides, h, t, s, w, p,
            EVEN=w == wide and p == narrow, EXACT=exact, BM=queries, BN=keys, BW=wide, BP=narrow, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip


def _jit(kernel: Callable[..., Any]) -> Any:
    return kernel if triton is None else triton.jit(kernel, do_not_specialize=UNSPECIFIC)


@_jit
def _load(pointer, row, stride, column, rows, columns, MASKED: tl.constexpr, EVEN: tl.constexpr):
    """A tile: rows and columns that do not exist are 0, which is looked at only where it may be so."""
    where = pointer + row[:, None] * stride + column[None, :]
    if MASKED:
        return tl.load(where, mask=(row[:, None] < rows) & (column[None, :] < columns), other=0.0)
    if not EVEN:
        return tl.load(where, mask=column[None, :] < columns, other=0.0)
    return tl.load(where)


@_jit
def _scores(q, k, BIAS, key, row, first, shift, S, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """q . k + bias, -inf where a query (row) does not see a key: beyond its place, and before its document."""
    score = tl.dot(q, tl.trans(k), input_precision=EXACT)
    if BIAS is not None:
        if MASKED:
            score += tl.load(BIAS + key, mask=key < S, other=float("-inf"))[None, :]
        else:
            score += tl.load(BIAS + key)[None, :]
    if MASKED:
        seen = (key[None, :] <= row[:, None] + shift) & (key[None, :] < S) & (key[None, :] >= first[:, None])
        score = tl.where(seen, score, float("-inf"))
    return score


@_jit
def _read_keys(
    q, y, top, found, K, V, BIAS, row, first, ks, vs, begin, end, shift, S, W, P,
    MASKED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The forward pass over the keys from begin to end."""
    for start in range(begin, end, BN):
        key = start + tl.arange(0, BN)
        k = _load(K, key, ks, tl.arange(0, BW), S, W, MASKED, EVEN)
        score = _scores(q, k, BIAS, key, row, first, shift, S, MASKED, EXACT)
        now = tl.maximum(top, tl.max(score, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp(score - base[:, None])
        scale = tl.exp(top - base)
        found = found * scale + tl.sum(weight, 1)
        v = _load(V, key, vs, tl.arange(0, BP), S, P, MASKED, EVEN)
        y = y * scale[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=EXACT)
        top = now
    return y, top, found


@_jit
def _ranges(FIRST, row, tokens, block, shift, T, S, BM: tl.constexpr, BN: tl.constexpr):
    """Of a block of queries: where each one's document begins, and the keys from `begin` to `end` that any of them sees, of
    which all see those from `sure` to `full`."""
    begin, sure = 0, 0
    full = tl.minimum((block * BM + shift + 1) // BN * BN, S // BN * BN)
    end = tl.minimum(S, shift + block * BM + BM)
    first = tl.zeros((BM,), tl.int32)
    if FIRST is not None:
        first = tl.load(FIRST + tokens + row, mask=row < T, other=2147483647)
        begin = tl.min(first, 0) // BN * BN
        sure = tl.cdiv(tl.max(tl.where(row < T, first, 0), 0), BN) * BN
        full = tl.maximum(full, sure)
    return first, begin, sure, full, end


@_jit
def _forward_kernel(
    Q, K, V, BIAS, NULL, FIRST, LAST, Y, M, TOTAL,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, yb, yh, yt, bb, bh, H, T, S, W, P,
    EVEN: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(1).to(tl.int64)
    b, h, shift = z // H, z % H, S - T
    row, p = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BP)
    q = _load(Q + b * qb + h * qh, row, qt, tl.arange(0, BW), T, W, True, EVEN)
    top = tl.full((BM,), float("-inf"), tl.float32)
    null = top
    if NULL is not None:
        null = tl.zeros((BM,), tl.float32) + tl.load(NULL + h)
        top = null
    if BIAS is not None:
        BIAS += b * bb + h * bh
    found, y = tl.zeros((BM,), tl.float32), tl.zeros((BM, BP), tl.float32)
    K += b * kb + h * kh
    V += b * vb + h * vh
    first, begin, sure, full, end = _ranges(FIRST, row, b * T, tl.program_id(0), shift, T, S, BM, BN)
    if FIRST is not None:
        y, top, found = _read_keys(
            q, y, top, found, K, V, BIAS, row, first, ks, vs, begin, sure, shift, S, W, P, True, EVEN, EXACT, BN, BW, BP
        )
    y, top, found = _read_keys(
        q, y, top, found, K, V, BIAS, row, first, ks, vs, sure, full, shift, S, W, P, False, EVEN, EXACT, BN, BW, BP
    )
    y, top, found = _read_keys(
        q, y, top, found, K, V, BIAS, row, first, ks, vs, full, end, shift, S, W, P, True, EVEN, EXACT, BN, BW, BP
    )
    base = tl.where(top == float("-inf"), 0.0, top)
    total = found
    if NULL is not None:
        total += tl.exp(null - base)
    none = total == 0
    total = tl.where(none, 1.0, total)
    place = z * T + row
    tl.store(M + place, found / total, mask=row < T)
    tl.store(TOTAL + place, tl.where(none, float("inf"), base + tl.log(total)), mask=row < T)
    where = Y + b * yb + h * yh + row[:, None] * yt + p[None, :]
    tl.store(where, (y / total[:, None]).to(Y.dtype.element_ty), mask=(row[:, None] < T) & (p[None, :] < P))


@_jit
def _collect_queries(
    dk, dv, dbias, k, v, bias, Q, DY, TOTAL, C, key, last, qt, yt, begin, end, shift, T, S, W, P,
    MASKED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradients by a block of keys, from the queries between begin and end."""
    for start in range(begin, end, BM):
        row = start + tl.arange(0, BM)
        q = _load(Q, row, qt, tl.arange(0, BW), T, W, MASKED, EVEN)
        dy = _load(DY, row, yt, tl.arange(0, BP), T, P, MASKED, EVEN)
        total = tl.load(TOTAL + row, mask=row < T, other=float("inf"))
        c = tl.load(C + row, mask=row < T, other=0.0)
        score = tl.dot(k, tl.trans(q), input_precision=EXACT) + bias[:, None]
        weight = tl.exp(score - total[None, :])
        if MASKED:
            seen = (key[:, None] <= row[None, :] + shift) & (row[None, :] < last[:, None])
            weight = tl.where(seen, weight, 0.0)
        dv += tl.dot(weight.to(dy.dtype), dy, input_precision=EXACT)
        dscore = weight * (tl.dot(v, tl.trans(dy), input_precision=EXACT) + c[None, :])
        dbias += tl.sum(dscore, 1)
        dk += tl.dot(dscore.to(q.dtype), q, input_precision=EXACT)
    return dk, dv, dbias


@_jit
def _key_kernel(
    Q, K, V, BIAS, NULL, FIRST, LAST, DY, C, TOTAL, DK, DV, DBIAS,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, yb, yh, yt, bb, bh, H, T, S, W, P,
    EVEN: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(1).to(tl.int64)
    b, h, shift, block = z // H, z % H, S - T, tl.program_id(0)
    key, w, p = block * BN + tl.arange(0, BN), tl.arange(0, BW), tl.arange(0, BP)
    k = _load(K + b * kb + h * kh, key, ks, w, S, W, True, EVEN)
    v = _load(V + b * vb + h * vh, key, vs, p, S, P, True, EVEN)
    bias = tl.zeros((BN,), tl.float32)
    if BIAS is not None:
        bias = tl.load(BIAS + b * bb + h * bh + key, mask=key < S, other=float("-inf"))
    dk, dv, dbias = tl.zeros((BN, BW), tl.float32), tl.zeros((BN, BP), tl.float32), tl.zeros((BN,), tl.float32)
    begin = tl.maximum(0, block * BN - shift) // BM * BM
    last, end = tl.zeros((BN,), tl.int32) + T, T
    full = T // BM * BM
    if LAST is not None:
        last = tl.load(LAST + b * T + key, mask=key < S, other=0)
        end = tl.max(last, 0)
        full = tl.min(tl.where(key < S, last, T), 0) // BM * BM
    sure = tl.cdiv(tl.maximum(0, block * BN + BN - 1 - shift), BM) * BM  # queries from there on see all of these keys
    sure = tl.minimum(sure, end)
    full = tl.maximum(full, sure)
    Q += b * qb + h * qh
    DY += b * yb + h * yh
    C += z * T
    TOTAL += z * T
    dk, dv, dbias = _collect_queries(
        dk, dv, dbias, k, v, bias, Q, DY, TOTAL, C, key, last,
        qt, yt, begin, sure, shift, T, S, W, P, True, EVEN, EXACT, BM, BW, BP,
    )  # fmt: skip
    dk, dv, dbias = _collect_queries(
        dk, dv, dbias, k, v, bias, Q, DY, TOTAL, C, key, last,
        qt, yt, sure, full, shift, T, S, W, P, False, EVEN, EXACT, BM, BW, BP,
    )  # fmt: skip
    dk, dv, dbias = _collect_queries(
        dk, dv, dbias, k, v, bias, Q, DY, TOTAL, C, key, last,
        qt, yt, full, end, shift, T, S, W, P, True, EVEN, EXACT, BM, BW, BP,
    )  # fmt: skip
    place = (z * S + key)[:, None]
    tl.store(DK + place * W + w[None, :], dk.to(DK.dtype.element_ty), mask=(key[:, None] < S) & (w[None, :] < W))
    tl.store(DV + place * P + p[None, :], dv.to(DV.dtype.element_ty), mask=(key[:, None] < S) & (p[None, :] < P))
    tl.store(DBIAS + z * S + key, dbias, mask=key < S)


@_jit
def _collect_keys(
    dq, q, dy, total, c, K, V, BIAS, row, first, ks, vs, begin, end, shift, S, W, P,
    MASKED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradient by a block of queries, from the keys between begin and end."""
    for start in range(begin, end, BN):
        key = start + tl.arange(0, BN)
        k = _load(K, key, ks, tl.arange(0, BW), S, W, MASKED, EVEN)
        v = _load(V, key, vs, tl.arange(0, BP), S, P, MASKED, EVEN)
        weight = tl.exp(_scores(q, k, BIAS, key, row, first, shift, S, MASKED, EXACT) - total[:, None])
        dscore = weight * (tl.dot(dy, tl.trans(v), input_precision=EXACT) + c[:, None])
        dq += tl.dot(dscore.to(k.dtype), k, input_precision=EXACT)
    return dq


@_jit
def _query_kernel(
    Q, K, V, BIAS, NULL, FIRST, LAST, DY, C, TOTAL, DQ,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, yb, yh, yt, bb, bh, H, T, S, W, P,
    EVEN: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(1).to(tl.int64)
    b, h, shift = z // H, z % H, S - T
    row, w = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BW)
    q = _load(Q + b * qb + h * qh, row, qt, w, T, W, True, EVEN)
    dy = _load(DY + b * yb + h * yh, row, yt, tl.arange(0, BP), T, P, True, EVEN)
    total = tl.load(TOTAL + z * T + row, mask=row < T, other=float("inf"))
    c = tl.load(C + z * T + row, mask=row < T, other=0.0)
    if BIAS is not None:
        BIAS += b * bb + h * bh
    K += b * kb + h * kh
    V += b * vb + h * vh
    dq = tl.zeros((BM, BW), tl.float32)
    first, begin, sure, full, end = _ranges(FIRST, row, b * T, tl.program_id(0), shift, T, S, BM, BN)
    if FIRST is not None:
        dq = _collect_keys(
            dq, q, dy, total, c, K, V, BIAS, row, first, ks, vs, begin, sure, shift, S, W, P, True, EVEN, EXACT, BN, BW, BP
        )
    dq = _collect_keys(
        dq, q, dy, total, c, K, V, BIAS, row, first, ks, vs, sure, full, shift, S, W, P, False, EVEN, EXACT, BN, BW, BP
    )
    dq = _collect_keys(
        dq, q, dy, total, c, K, V, BIAS, row, first, ks, vs, full, end, shift, S, W, P, True, EVEN, EXACT, BN, BW, BP
    )
    where = DQ + (z * T + row)[:, None] * W + w[None, :]
    tl.store(where, dq.to(DQ.dtype.element_ty), mask=(row[:, None] < T) & (w[None, :] < W))
