"""The gated delta rule of Gated DeltaNet and Kimi Delta Attention, and its single step.

    S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T,    y_t = S_t^T q_t / sqrt(n),    a_t = exp(log_decay_t)

with queries and keys scaled to length 1; a_t is one number a head (arXiv 2412.06464) or one a channel (arXiv 2510.26692). Chunk
by chunk (arXiv 2406.06484, section 3): what a chunk writes solves a triangular system of as many equations as it has tokens,
whose right side depends on the state that enters. All chunks' systems are solved at once for both parts of the right side, and
then only products with the state are left for the walk over the chunks. surgery/modeling/delta_reference.py is the plain form.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.functions import on_gpu, own_precision, result_dtype

CHUNK = 16  # tokens: a CPU spends least on chunks of this length, and with a decay for every channel a GPU as well
CHUNK_ON_GPU = 64
MOST = 2**18  # numbers of the decays between the tokens of a chunk that are held at once: what fits a cache of a CPU
MOST_ON_GPU = 2**26
EPS = 1e-6  # of the squared length of queries and keys, as in transformers


def unit(m: Tensor) -> Tensor:
    """m (..., n) scaled to length 1, in float32 at least."""
    m = m.to(torch.promote_types(m.dtype, torch.float32))
    return m * torch.rsqrt((m * m).sum(-1, keepdim=True) + EPS)


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
        return packing.apply(lambda *rows: delta_rule(*rows)[0], q, k, v, log_decay, beta), None
    with own_precision(v):
        return _delta_rule(q, k, v, log_decay, beta, initial_state)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    (b, t, h, p), (g, n), work = v.shape, k.shape[2:], torch.promote_types(v.dtype, torch.float32)
    state = v.new_zeros(b, h, n, p, dtype=work) if initial_state is None else initial_state.to(work)
    if not v.numel():
        return v.to(result_dtype(v)), state
    log_decay = log_decay[..., None] if log_decay.dim() == beta.dim() else log_decay
    length = CHUNK_ON_GPU if on_gpu(v) and log_decay.shape[-1] == 1 else CHUNK
    chunks = -(-t // length)

    def folded(m: Tensor) -> Tensor:
        """(b, t, heads, x) -> (b, heads, c, q, x), zero beyond t: a token with beta 0 and no decay changes nothing."""
        m = F.pad(m.transpose(1, 2), (0, 0, 0, chunks * length - t))
        return m.reshape(b, m.shape[1], chunks, length, m.shape[-1])

    def of_heads(m: Tensor) -> Tensor:
        return m if g == h else m.repeat_interleave(h // g, 1)

    queries, keys, values = folded(unit(q) * n**-0.5), folded(unit(k)), folded(v.to(work))
    # The sum of the logarithms in float64: float32's rounding of a large sum would be a relative error of the decay.
    rate, decay = folded(beta[..., None].to(work)), folded(log_decay.double()).cumsum(-2)
    entering, last = decay.exp().to(work), decay[..., -1:, :]
    leaving, through = (last - decay).exp().to(work), last.exp().to(work).mT
    if decay.shape[-1] == 1:
        # Above the diagonal the exponent is positive and exp could overflow; there the products are not used.
        between = (decay - decay.mT).clamp(max=0).to(work).exp()
        own, scores = (of_heads(m @ keys.mT) * between for m in (keys, queries))  # once per query-key pair
        queries, keys = of_heads(queries), of_heads(keys)
    else:
        queries, keys = of_heads(queries), of_heads(keys)
        size = max(1, (MOST_ON_GPU if on_gpu(v) else MOST) // (b * h * length * length * n))  # chunks at a time
        parts = zip(*(m.split(size, 2) for m in (keys, queries, decay.to(work))), strict=True)
        own, scores = torch.cat([_faded(key, query, part) for key, query, part in parts], 2).unbind(-1)
    right = torch.cat([values, keys * entering], -1) * rate
    solved = torch.linalg.solve_triangular((own * rate).tril(-1), right, upper=False, unitriangular=True)
    written, corrected = solved.split([p, n], -1)
    scores, queries, keys = scores.tril(), queries * entering, (keys * leaving).mT
    out = []
    for i in range(chunks):
        new = written[:, :, i] - corrected[:, :, i] @ state
        out.append(queries[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * through[:, :, i] + keys[:, :, i] @ new
    y = torch.stack(out, 2).reshape(b, h, -1, p)[:, :, :t].transpose(1, 2)
    return y.to(result_dtype(v)), state


def _faded(keys: Tensor, queries: Tensor, decay: Tensor) -> Tensor:
    """Products of keys and of queries (..., t, n) with keys, each channel faded by its decay from s to t: (..., t, s, 2).
    decay: sums of log_decay. Where s > t they mean nothing, and are finite."""
    between = (decay[..., :, None, :] - decay[..., None, :, :]).clamp(max=0).exp()
    faded = between * keys[..., None, :, :]
    return torch.stack([(m[..., :, None, :] * faded).sum(-1) for m in (keys, queries)], -1)


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One token. Updates `state` (b, h, n, p) in place and returns y (b, h, p); q and k (b, g, n), v (b, h, p), log_decay (b,
    h) or (b, h, n), beta (b, h)."""
    heads, n, work = v.shape[1], k.shape[-1], torch.promote_types(v.dtype, torch.float32)
    log_decay = log_decay[..., None] if log_decay.dim() == beta.dim() else log_decay
    q, k = (unit(m).to(work).repeat_interleave(heads // m.shape[1], dim=1) for m in (q, k))
    kept = state.to(work) * log_decay.to(work).exp()[..., None]
    with own_precision(v):
        change = (v.to(work) - (k[:, :, None] @ kept)[:, :, 0]) * beta.to(work)[..., None]
        new = kept + k[..., None] * change[:, :, None]
        state.copy_(new)
        return ((q[:, :, None] @ new)[:, :, 0] * n**-0.5).to(result_dtype(v))
