"""The gated delta rule of Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692), and its single step.

A head keeps a state S (N x P) that maps keys to values. At every token it decays, is corrected at the token's key, and is read:

    S_t = a_t S_{t-1} + beta_t k_t (v_t - (a_t S_{t-1})^T k_t)^T,    y_t = S_t^T q_t / sqrt(N)

with a_t = exp(log_decay_t) in (0, 1]: one number a head in Gated DeltaNet, one for each of the N channels (rows of S) in Kimi
Delta Attention. Queries and keys are scaled to length 1 first, here. beta_t says how much of what the state holds for k_t is
replaced by v_t: at 1 all of it.

`chunked` is ours, in PyTorch; `stock` is the function inside transformers, which is fla's where that is installed; `reference`
walks over the tokens and is what the others are tested against (in float64).

The chunked form (arXiv 2406.06484, section 3; decay as in arXiv 2412.06464, section 3.3). Let u_t be what the bracket above
writes, times beta_t; A_t the sum of log_decay over the chunk's tokens up to t; S the state that enters. Then

    u_t + beta_t sum_{s<t} (k_t . exp(A_t - A_s) k_s) u_s = beta_t (v_t - S^T exp(A_t) k_t)

is a triangular system of as many equations as the chunk has tokens. It is solved for both terms of the right side before the
state is known, and only the state travels from chunk to chunk. With one decay a head, it leaves the product of keys; with one
a channel it does not, and is multiplied out: divided into exp(A_t) and exp(-A_s), the latter would overflow.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.dispatch import Backend, Operation
from surgery.kernels.functions import result_dtype, seeded, transformed
from surgery.kernels.operators import Signature
from surgery.kernels.packing import Packing, check_no_state

CHUNK = 16  # tokens; the quadratic part costs most on a CPU
CHUNK_ON_GPU = 64
MOST = 2**24  # numbers that are multiplied out at once where each channel has a decay
EPS = 1e-6  # of the squared length of queries and keys, as in transformers


def unit(m: Tensor) -> Tensor:
    """m (..., n) scaled to length 1, in float32 at least."""
    m = m.to(torch.promote_types(m.dtype, torch.float32))
    return m * torch.rsqrt((m * m).sum(-1, keepdim=True) + EPS)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    *, packing: Packing | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scan a sequence.

    q and k (b, t, g, n), of any length; v (b, t, h, p) with h a multiple of g: head i reads the pair i // (h / g); log_decay
    (b, t, h), or (b, t, h, n) for one a channel, at most 0; beta (b, t, h); initial_state (b, h, n, p). Returns y (b, t, h, p)
    in the dtype of v (for float16, ours give float32), and the state after the last token (b, h, n, p), in float32 at least
    unless from the reference.

    packing: of the tokens, where several documents share a row; every one begins from an empty state, and the states are those
    after each, (documents, h, n, p).
    """
    if packing is not None:
        check_no_state(initial_state)
        return packing.scan(lambda *rows: delta_rule(*rows, backend=backend), q, k, v, log_decay, beta)
    if not v.numel():
        shape = (len(v), v.shape[2], k.shape[3], v.shape[3])
        empty = v.new_zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32))
        return v.to(result_dtype(v)), empty if initial_state is None else initial_state
    log_decay = by_channel(log_decay, beta)
    return DELTA_RULE(k, q, v, log_decay, beta, initial_state, backend=backend)  # k first: all results depend on it


def by_channel(log_decay: Tensor, beta: Tensor) -> Tensor:
    """(..., h, 1) for one decay a head, (..., h, n) for one a channel; beta (..., h)."""
    return log_decay[..., None] if log_decay.dim() == beta.dim() else log_decay


def _reference(k, q, v, log_decay, beta, initial_state):
    heads, n = v.shape[2], k.shape[3]
    q, k = (unit(m).to(v.dtype).repeat_interleave(heads // m.shape[2], dim=2) for m in (q, k))
    state = v.new_zeros(len(v), heads, n, v.shape[3]) if initial_state is None else initial_state
    out = []
    for t in range(v.shape[1]):
        state = state * log_decay[:, t].exp()[..., None]
        held = (state * k[:, t, ..., None]).sum(-2)
        state = state + k[:, t, ..., None] * ((v[:, t] - held) * beta[:, t, :, None])[:, :, None]
        out.append((state * q[:, t, ..., None]).sum(-2) * n**-0.5)
    return torch.stack(out, 1), state


def _chunked(k, q, v, log_decay, beta, initial_state):
    b, t, g, n = k.shape
    h, p = v.shape[2:]
    dtype, work = result_dtype(v), torch.promote_types(v.dtype, torch.float32)
    length = CHUNK_ON_GPU if v.device.type != "cpu" and log_decay.shape[-1] == 1 else CHUNK
    chunks = -(-t // length)

    def folded(m: Tensor) -> Tensor:
        """(b, t, heads, x) -> (b, heads, c, q, x), zero beyond t: a token with beta 0 and no decay changes nothing."""
        m = F.pad(m.transpose(1, 2), (0, 0, 0, chunks * length - t))
        return m.reshape(b, m.shape[1], chunks, length, m.shape[-1])

    def of_heads(m: Tensor) -> Tensor:
        return m if g == h else m.repeat_interleave(h // g, 1)

    q, k, v = folded(unit(q).to(work) * n**-0.5), folded(unit(k).to(work)), folded(v.to(work))
    beta, decay = folded(beta[..., None].to(work)), folded(log_decay.double()).cumsum(-2)  # as in ssd_chunked
    entering, last = decay.exp().to(work), decay[..., -1:, :]
    leaving, through = (last - decay).exp().to(work), last.exp().to(work).transpose(-1, -2)
    if decay.shape[-1] == 1:
        # Above the diagonal the exponent is positive and exp could overflow; there the products are not used.
        between = (decay - decay.transpose(-1, -2)).clamp(max=0).to(work).exp()
        own, scores = (of_heads(m @ k.transpose(-1, -2)) * between for m in (k, q))  # once per pair
        q, k = of_heads(q), of_heads(k)
    else:
        q, k = of_heads(q), of_heads(k)
        size = max(1, MOST // (b * h * length * length * n))  # chunks at a time
        parts = zip(*(m.split(size, 2) for m in (k, q, decay)), strict=True)
        faded = [_faded(torch.stack([key, query], -1), part, key, part) for key, query, part in parts]
        own, scores = torch.cat(faded, 2).unbind(-1)
    right = torch.cat([v, k * entering], -1) * beta
    written, corrected = torch.linalg.solve_triangular(own * beta, right, upper=False, unitriangular=True).split([p, n], -1)
    scores, q, k = scores.tril(), q * entering, (k * leaving).transpose(-1, -2)
    state = v.new_zeros(b, h, n, p) if initial_state is None else initial_state.to(work)
    out = []
    for i in range(chunks):
        new = written[:, :, i] - corrected[:, :, i] @ state
        out.append(q[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * through[:, :, i] + k[:, :, i] @ new
    y = torch.stack(out, 2).reshape(b, h, -1, p)[:, :, :t].transpose(1, 2)
    return y.to(dtype), state


def _faded(readers: Tensor, reading: Tensor, k: Tensor, writing: Tensor) -> Tensor:
    """Products of readers (..., t, n, r) with keys (..., s, n), each channel faded by its decay from s to t, (..., t, s, r);
    `reading` (..., t, n) and `writing` (..., s, n) are the sums of log_decay. Where s > t they mean nothing, and are finite."""
    between = (reading[..., :, None, :] - writing[..., None, :, :]).clamp(max=0).to(k.dtype).exp()
    return (k[..., None, :, :] * between) @ readers


def _stock(k, q, v, log_decay, beta, initial_state):
    rule, _, log_decay = _of_stock(log_decay, k)
    options = {"initial_state": initial_state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return rule(q, k, v, g=log_decay, beta=beta, **options)


def _of_stock(log_decay, k):
    """The functions for a sequence and for one token, and the decay as they take it."""
    if log_decay.shape[-1] == 1 < k.shape[-1]:
        from transformers.models.qwen3_next import modeling_qwen3_next as delta

        return delta.torch_chunk_gated_delta_rule, delta.torch_recurrent_gated_delta_rule, log_decay[..., 0]
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    return kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention, log_decay


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    options = seeded()
    k, q, v = (torch.randn(1, 40, *shape, **options).to(device, dtype) for shape in ((2, 8), (2, 8), (4, 16)))
    log_decay, beta = (torch.rand(1, 40, 4, **options).to(device) for _ in range(2))
    return k, q, v, -0.2 * log_decay[..., None], beta.to(dtype), None


DELTA_RULE = Operation(
    "delta_rule",
    Backend("chunked", _chunked, transformed, opaque=True),
    Backend("stock", _stock, probed=True, opaque=True),
    Backend("reference", _reference),
    example=_example,
    signature=Signature(
        ("Tensor k", "Tensor q", "Tensor v", "Tensor log_decay", "Tensor beta", "Tensor? initial_state"),
        2,
        lambda k, q, v, *rest: [
            (v.shape, result_dtype(v)),
            ((len(v), v.shape[2], k.shape[3], v.shape[3]), torch.promote_types(v.dtype, torch.float32)),
        ],
    ),
)


def delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, backend: str | None = None
) -> Tensor:
    """One token. Updates `state` (b, h, n, p) in place and returns y (b, h, p); q and k (b, g, n), v (b, h, p), log_decay (b,
    h) or (b, h, n), beta (b, h)."""
    return DELTA_STEP(state, k, q, v, by_channel(log_decay, beta), beta, backend=backend)


def _step(state, k, q, v, log_decay, beta):
    heads, work = v.shape[1], torch.promote_types(v.dtype, torch.float32)
    n = k.shape[-1]
    q, k = (unit(m).to(work).repeat_interleave(heads // m.shape[1], dim=1) for m in (q, k))
    kept = state.to(work) * log_decay.to(work).exp()[..., None]
    change = (v.to(work) - (k[:, :, None] @ kept)[:, :, 0]) * beta.to(work)[..., None]
    new = kept + k[..., None] * change[:, :, None]
    state.copy_(new)
    return ((q[:, :, None] @ new)[:, :, 0] * n**-0.5).to(result_dtype(v))


def _stock_step(state, k, q, v, log_decay, beta):
    _, step, log_decay = _of_stock(log_decay, k)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    y, new = step(*(m[:, None] for m in (q, k, v)), g=log_decay[:, None], beta=beta[:, None], **options)
    state.copy_(new)
    return y[:, 0]


def _reference_step(state, k, q, v, log_decay, beta):
    y, new = _reference(k[:, None], q[:, None], v[:, None], log_decay[:, None], beta[:, None], state)
    state.copy_(new)
    return y[:, 0].to(v.dtype)


def _step_example(device: torch.device, dtype: torch.dtype) -> tuple:
    arguments: Any = _example(device, dtype)[:-1]
    state = torch.randn(1, 4, 8, 16, **seeded()).to(device)
    return (state, *(m[:, 0] for m in arguments))


DELTA_STEP = Operation(
    "delta_step",
    Backend("torch", _step),
    Backend("stock", _stock_step, probed=True),
    Backend("reference", _reference_step),
    example=_step_example,
    differentiable=False,
    signature=Signature(
        ("Tensor(a!) state", "Tensor k", "Tensor q", "Tensor v", "Tensor log_decay", "Tensor beta"),
        1,
        lambda state, k, q, v, *rest: [(v.shape, result_dtype(v))],
    ),
)


def delta_matrix(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    heads: Sequence[int] | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The matrix of a head, such that M v is delta_rule's y from an empty state:

        M = tril(Q ~ K) (I + strict_lower(diag(beta) (K ~ K)))^-1 diag(beta) / sqrt(n)
        (Q ~ K)_ij = sum_c Q_ic exp(g_{j+1,c} + ... + g_{i,c}) K_jc

    with g the logarithms of the decay, and queries and keys of length 1. q and k (b, t, g, n), of any length; log_decay (b, t,
    h) or (b, t, h, n); beta (b, t, h). Returns (b, len(heads), len(rows), t) as ssd_matrix does. The whole triangle of each
    head is held at once.
    """
    t, h = beta.shape[1:]
    work = torch.promote_types(beta.dtype, torch.float32)
    chosen = [range(h)[i] for i in (range(h) if heads is None else heads)]
    columns = torch.arange(t, device=beta.device)
    rows = columns if rows is None else columns[rows.to(beta.device)]
    pairs = [head // (h // k.shape[2]) for head in chosen]
    q, k = (unit(m[:, :, pairs]).transpose(1, 2).to(work) for m in (q, k))  # b heads t n
    decay = by_channel(log_decay, beta)[:, :, chosen].double().cumsum(1).transpose(1, 2)
    rates = beta.to(work)[:, :, chosen].transpose(1, 2)

    def products(readers: Tensor, reading: Tensor) -> Tensor:
        if decay.shape[-1] == 1:
            return readers @ k.transpose(-1, -2) * (reading - decay.transpose(-1, -2)).clamp(max=0).to(work).exp()
        parts = zip(readers.split(CHUNK, 2), reading.split(CHUNK, 2), strict=True)  # each is n times as large as the result
        return torch.cat([_faded(part[..., None], faded, k, decay)[..., 0] for part, faded in parts], 2)

    read = products(q[:, :, rows], decay[:, :, rows]).masked_fill(columns > rows[:, None], 0) * k.shape[-1] ** -0.5
    system = rates[..., None] * products(k, decay)
    return torch.linalg.solve_triangular(system, read, upper=False, left=False, unitriangular=True) * rates[:, :, None]
