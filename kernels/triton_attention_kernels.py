"""The kernels of Triton attention: forward and backward after FlashAttention-2 (arXiv 2307.08691).

    o_i = sum_j p_ij v_j,   p_ij = exp(q_i . k_j - lse_i),   lse_i = log sum_j exp(q_i . k_j)

over the keys j that exist, up to the query's own place. The scores are never stored: the forward pass keeps a running maximum
and sum, the backward pass computes p again from lse:

    dp_ij = do_i . v_j,             ds_ij = p_ij (dp_ij - do_i . o_i),
    dq_i = sum_j ds_ij k_j,         dk_j = sum_i ds_ij q_i,             dv_j = sum_i p_ij do_i

What sets them apart from the usual kernels: queries and keys have a width of their own, a power of two and a bit (N and the
time step: 129), so they are two tiles, 128 + 16, not one of 256; and values may be very wide (all heads of a pair side by
side), so they are cut into blocks, each of which computes the scores again. Every sum is made by one program, in one order, so
results are the same every time.

In every kernel: q (b, pairs, t, W), k (b, pairs, s, W), v (b, pairs, s, DV) and do (b, pairs, t, DV) have strides q_b, q_p,
q_t, q_w and so on. W1 and W2 are the tiles of a query's width, BV that of a value's; BM and BN blocks of queries and of keys.
HOLES: exists (b, s) says which keys do. LONG tells long calls from short ones where tiles are chosen, and does nothing else.

Where Triton is missing this file still loads.
"""

import importlib
from types import SimpleNamespace
from typing import Any

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=int)


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


@_jit
def _tile(x, rows, row, col, keep, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The given rows and BLOCK columns from `first` of a matrix with strides row and col. Rows not to be kept and columns from
    WIDTH on are 0, whatever lies there."""
    cols = first + tl.arange(0, BLOCK)
    at = x + rows[:, None].to(tl.int64) * row + cols[None, :] * col
    if WIDTH % BLOCK:
        return tl.load(at, mask=keep[:, None] & (cols < WIDTH)[None, :], other=0.0)
    else:  # a mask by columns may forbid wide loads
        return tl.load(at, mask=keep[:, None], other=0.0)


@_jit
def _two_tiles(x, rows, row, col, keep, W: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr):
    """Queries or keys: the first W1 columns, and W2 for the others (without others, the first again)."""
    head = _tile(x, rows, row, col, keep, 0, W1, W if W < W1 else W1)
    tail = head
    if W2:
        tail = _tile(x + W1 * col, rows, row, col, keep, 0, W2, W - W1)
    return head, tail


@_jit
def _put(x, rows, row, keep, first, tile, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    cols = first + tl.arange(0, BLOCK)
    at = x + rows[:, None].to(tl.int64) * row + cols[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=keep[:, None] & (cols < WIDTH)[None, :])


@_jit
def _scores(a1, a2, b1, b2, W2: tl.constexpr):
    """a . b / log 2: exponents are in powers of two, which a GPU computes faster."""
    scores = tl.dot(a1, tl.trans(b1), input_precision="ieee")
    if W2:
        scores = tl.dot(a2, tl.trans(b2), scores, input_precision="ieee")
    return scores * 1.4426950408889634


@_jit
def _existing(exists, keys, step, s, HOLES: tl.constexpr):
    """Which of the keys exist."""
    keep = keys < s
    if HOLES:
        keep = keep & (tl.load(exists + keys * step, mask=keep, other=0) != 0)
    return keep


@_jit
def forward(
    q, k, v, exists, o, lse,
    q_b, q_p, q_t, q_w, k_b, k_p, k_s, k_w, v_b, v_p, v_s, v_d, e_b, e_s, o_z, o_b, o_p, o_t, pairs, t, s, span,
    W: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    HOLES: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Axis 0: a pair of a sequence, and BM of its queries; axis 1: a block of BV values; axis 2: `span` of the keys.
    Writes o, and lse in powers of two (-inf for a query that sees nothing)."""
    blocks = tl.cdiv(t, BM)
    place = tl.program_id(0) // blocks
    m = (blocks - 1 - tl.program_id(0) % blocks) * BM  # the longest first, so that no long one is left over at the end
    b, p = (place // pairs).to(tl.int64), (place % pairs).to(tl.int64)
    q, k, v, o = q + b * q_b + p * q_p, k + b * k_b + p * k_p, v + b * v_b + p * v_p, o + b * o_b + p * o_p
    if HOLES:
        exists += b * e_b
    part, column = tl.program_id(2), tl.program_id(1) * BV
    rows = m + tl.arange(0, BM)
    inside = rows < t
    q1, q2 = _two_tiles(q, rows, q_t, q_w, inside, W, W1, W2)

    shift = s - t  # query i stands at key i + shift
    low = part * span
    high = tl.minimum(tl.minimum(s, m + BM + shift), low + span)
    full = low  # up to here every key is seen by all of these queries, and no score need be masked
    if not HOLES:
        full = tl.minimum(low + tl.maximum(0, m + shift + 1 - low) // BN * BN, tl.maximum(low, high))
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.full((BM,), 0.0, tl.float32)
    mean = tl.full((BM, BV), 0.0, tl.float32)
    for edge in tl.static_range(HOLES, 2):
        begin, end = low, full
        if edge:
            begin, end = full, high
        for start in range(begin, end, BN):
            keys = start + tl.arange(0, BN)
            keep = _existing(exists, keys, e_s, s, HOLES)
            k1, k2 = _two_tiles(k, keys, k_s, k_w, keep, W, W1, W2)
            scores = _scores(q1, q2, k1, k2, W2)
            if edge:
                scores = tl.where((keys[None, :] <= rows[:, None] + shift) & keep[None, :], scores, float("-inf"))
            peak = tl.maximum(top, tl.max(scores, 1))
            level = tl.where(peak == float("-inf"), 0.0, peak)  # nothing seen yet: -inf - -inf would be NaN
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(top - level)
            values = _tile(v, keys, v_s, v_d, keep, column, BV, DV)
            mean = tl.dot(weights.to(values.dtype), values, mean * fade[:, None], input_precision="ieee")
            total = total * fade + tl.sum(weights, 1)
            top = peak
    total = tl.where(total == 0, 1.0, total)
    mean = mean / total[:, None]
    _put(o + part.to(tl.int64) * o_z, rows, o_t, inside, column, mean, BV, DV)
    if tl.program_id(1) == 0:
        at = (part * (tl.num_programs(0) // blocks) + place).to(tl.int64) * t
        tl.store(lse + at + rows, top + tl.log2(total), mask=inside)


@_jit
def backward_queries(
    q, k, v, exists, o, do, lse, delta, dq,
    q_b, q_p, q_t, q_w, k_b, k_p, k_s, k_w, v_b, v_p, v_s, v_d, e_b, e_s, g_b, g_p, g_t, g_d, o_b, o_p, o_t, pairs, t, s,
    W: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    HOLES: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Axis 0 as in the forward pass. Writes dq (contiguous) and delta = do . o, which backward_keys needs."""
    blocks = tl.cdiv(t, BM)
    place = tl.program_id(0) // blocks
    m = (blocks - 1 - tl.program_id(0) % blocks) * BM
    b, p = (place // pairs).to(tl.int64), (place % pairs).to(tl.int64)
    q, k, v = q + b * q_b + p * q_p, k + b * k_b + p * k_p, v + b * v_b + p * v_p
    o, do = o + b * o_b + p * o_p, do + b * g_b + p * g_p
    if HOLES:
        exists += b * e_b
    rows = m + tl.arange(0, BM)
    inside = rows < t
    at = place.to(tl.int64) * t + rows
    level = tl.load(lse + at, mask=inside, other=float("inf"))
    level = tl.where(level == float("-inf"), float("inf"), level)  # a query that sees nothing: p = exp(-inf) = 0
    q1, q2 = _two_tiles(q, rows, q_t, q_w, inside, W, W1, W2)
    dot = tl.full((BM,), 0.0, tl.float32)
    for first in range(0, DV, BV):
        gradient = _tile(do, rows, g_t, g_d, inside, first, BV, DV).to(tl.float32)
        dot += tl.sum(gradient * _tile(o, rows, o_t, 1, inside, first, BV, DV).to(tl.float32), 1)
    tl.store(delta + at, dot, mask=inside)
    gradient = _tile(do, rows, g_t, g_d, inside, 0, BV, DV)  # stays if it is all

    shift = s - t
    high = tl.minimum(s, m + BM + shift)
    full = (m + shift + 1) // BN * BN
    if HOLES:
        full = 0
    dq1 = tl.full((BM, W1), 0.0, tl.float32)
    if W2:
        dq2 = tl.full((BM, W2), 0.0, tl.float32)
    for edge in tl.static_range(HOLES, 2):
        begin, end = 0, full
        if edge:
            begin, end = full, high
        for start in range(begin, end, BN):
            keys = start + tl.arange(0, BN)
            keep = _existing(exists, keys, e_s, s, HOLES)
            k1, k2 = _two_tiles(k, keys, k_s, k_w, keep, W, W1, W2)
            scores = _scores(q1, q2, k1, k2, W2)
            if edge:
                scores = tl.where((keys[None, :] <= rows[:, None] + shift) & keep[None, :], scores, float("-inf"))
            weights = tl.exp2(scores - level[:, None])
            if DV <= BV:
                values = _tile(v, keys, v_s, v_d, keep, 0, BV, DV)
                dp = tl.dot(gradient, tl.trans(values), input_precision="ieee")
            else:
                dp = tl.full((BM, BN), 0.0, tl.float32)
                for first in range(0, DV, BV):
                    gradient = _tile(do, rows, g_t, g_d, inside, first, BV, DV)
                    values = _tile(v, keys, v_s, v_d, keep, first, BV, DV)
                    dp = tl.dot(gradient, tl.trans(values), dp, input_precision="ieee")
            ds = (weights * (dp - dot[:, None])).to(k1.dtype)
            dq1 = tl.dot(ds, k1, dq1, input_precision="ieee")
            if W2:
                dq2 = tl.dot(ds, k2, dq2, input_precision="ieee")
    dq += place.to(tl.int64) * t * W
    _put(dq, rows, W, inside, 0, dq1, W1, W)
    if W2:
        _put(dq, rows, W, inside, W1, dq2, W2, W)


@_jit
def backward_keys(
    q, k, v, exists, do, lse, delta, dk, dv,
    q_b, q_p, q_t, q_w, k_b, k_p, k_s, k_w, v_b, v_p, v_s, v_d, e_b, e_s, g_b, g_p, g_t, g_d, pairs, t, s,
    W: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    HOLES: tl.constexpr, LONG: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Axis 0: a pair of a sequence, and BN of its keys; axis 1: a block of BV values. Writes dk if KEYS and dv if VALUES
    (contiguous): both at once where the values are one block, else in two launches, since dk needs all values. Scores are
    (keys, queries) here: what is summed over the queries is then the left side of a product as it stands."""
    blocks = tl.cdiv(s, BN)
    place = tl.program_id(0) // blocks
    n, column = tl.program_id(0) % blocks * BN, tl.program_id(1) * BV
    b, p = (place // pairs).to(tl.int64), (place % pairs).to(tl.int64)
    q, k, v, do = q + b * q_b + p * q_p, k + b * k_b + p * k_p, v + b * v_b + p * v_p, do + b * g_b + p * g_p
    if HOLES:
        exists += b * e_b
    keys = n + tl.arange(0, BN)
    keep = _existing(exists, keys, e_s, s, HOLES)
    k1, k2 = _two_tiles(k, keys, k_s, k_w, keep, W, W1, W2)
    if KEYS:
        values = _tile(v, keys, v_s, v_d, keep, 0, BV, DV)  # stays if it is all
        dk1 = tl.full((BN, W1), 0.0, tl.float32)
        if W2:
            dk2 = tl.full((BN, W2), 0.0, tl.float32)
    if VALUES:
        dv1 = tl.full((BN, BV), 0.0, tl.float32)

    shift = s - t
    low = tl.maximum(0, n - shift) // BM * BM  # the first queries that see one of these keys
    full = tl.minimum(tl.cdiv(tl.maximum(0, n + BN - 1 - shift), BM) * BM, tl.cdiv(t, BM) * BM)  # the first that see all
    for whole in tl.static_range(2):
        begin, end = low, full
        if whole:
            begin, end = full, t
        for start in range(begin, end, BM):
            rows = start + tl.arange(0, BM)
            inside = rows < t
            at = place.to(tl.int64) * t + rows
            level = tl.load(lse + at, mask=inside, other=float("inf"))
            level = tl.where(level == float("-inf"), float("inf"), level)
            q1, q2 = _two_tiles(q, rows, q_t, q_w, inside, W, W1, W2)
            scores = _scores(k1, k2, q1, q2, W2)
            if not whole:
                scores = tl.where(keys[:, None] <= rows[None, :] + shift, scores, float("-inf"))
            weights = tl.exp2(scores - level[None, :])  # nonsense in the rows of keys that do not exist; they go below
            gradient = _tile(do, rows, g_t, g_d, inside, column, BV, DV)
            if VALUES:
                dv1 = tl.dot(weights.to(gradient.dtype), gradient, dv1, input_precision="ieee")
            if KEYS:
                if DV <= BV:
                    dp = tl.dot(values, tl.trans(gradient), input_precision="ieee")
                else:
                    dp = tl.full((BN, BM), 0.0, tl.float32)
                    for first in range(0, DV, BV):
                        gradient = _tile(do, rows, g_t, g_d, inside, first, BV, DV)
                        values = _tile(v, keys, v_s, v_d, keep, first, BV, DV)
                        dp = tl.dot(values, tl.trans(gradient), dp, input_precision="ieee")
                dot = tl.load(delta + at, mask=inside, other=0.0)
                ds = (weights * (dp - dot[None, :])).to(q1.dtype)
                dk1 = tl.dot(ds, q1, dk1, input_precision="ieee")
                if W2:
                    dk2 = tl.dot(ds, q2, dk2, input_precision="ieee")
    if KEYS:
        dk += place.to(tl.int64) * s * W
        _put(dk, keys, W, keys < s, 0, tl.where(keep[:, None], dk1, 0.0), W1, W)
        if W2:
            _put(dk, keys, W, keys < s, W1, tl.where(keep[:, None], dk2, 0.0), W2, W)
    if VALUES:
        dv += place.to(tl.int64) * s * DV
        _put(dv, keys, DV, keys < s, column, tl.where(keep[:, None], dv1, 0.0), BV, DV)
