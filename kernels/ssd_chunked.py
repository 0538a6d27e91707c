"""The SSD scan in chunks, forward and backward (Mamba-2, arXiv 2405.21060, section 6), in plain PyTorch.

Within a chunk of Q tokens the scan is a masked product of Q x Q matrices; between chunks only the state travels. With a_i the
sum of A dt over the chunk's tokens up to i, S the state that enters and everything per head:

    y_i  = sum_{j<=i} exp(a_i - a_j) (C_i . B_j) dt_j x_j  +  exp(a_i) S C_i
    S'   = exp(a_Q) S + sum_j exp(a_Q - a_j) dt_j x_j B_j^T

Four things make it several times faster than the usual chunked form on a CPU. Chunks are short, because the quadratic part
costs most there. A segment of a few chunks is finished before the next one begins, so that it stays in the cache. C B^T is
computed once per *group*. The products with the state, which are most of the work, run over all heads of a group as one large
matrix product.

The backward pass is written by hand. It keeps only the states that enter the chunks, and computes the rest again.

Shapes below: b sequences, c chunks of q tokens in a segment, h heads of p channels, g groups of r heads, n the state size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import own_precision, result_dtype

CHUNK = 32  # tokens; twice as many where there are few heads, since their larger matrices still fit a core's cache
CHUNK_ON_GPU = 256  # a GPU computes a chunk's matrices quickly, but every launch takes time
SEGMENT = 2**18  # numbers that a segment's x may hold, on a GPU 64 times as many; a single chunk may hold more


class _Sizes(NamedTuple):
    b: int
    t: int
    h: int
    p: int
    g: int
    n: int
    work: torch.dtype

    @classmethod
    def of(cls, x: Tensor, B: Tensor) -> "_Sizes":
        (b, t, h, p), (g, n) = x.shape, B.shape[2:]
        return cls(b, t, h, p, g, n, torch.promote_types(x.dtype, torch.float32))

    def segments(self, device: torch.device) -> Iterator[tuple[slice, int]]:
        """The tokens of each segment, and its number of chunks, all of one length."""
        q = CHUNK_ON_GPU if device.type != "cpu" else 2 * CHUNK if self.b * self.h <= 32 else CHUNK
        most = max(1, SEGMENT * (64 if device.type != "cpu" else 1) // (self.b * q * self.h * self.p))
        start = 0
        while start < self.t:
            chunks = min(most, (self.t - start) // q)
            stop = start + chunks * q if chunks else self.t  # what is left is a shorter chunk
            yield slice(start, stop), max(chunks, 1)
            start = stop


class _Segment:
    """What both passes need of a segment."""

    def __init__(self, size: _Sizes, c: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor):
        self.size, work, q = size, size.work, x.shape[1] // c
        self.x = x.to(work).reshape(size.b * c, q, size.h, size.p)
        self.dt = dt.to(work).reshape(size.b * c, q, size.h, 1)
        self.xd = self.x * self.dt  # b*c q h p
        self.B = B.to(work).reshape(size.b * c, q, size.g, size.n).transpose(1, 2).reshape(-1, q, size.n)  # b*c*g q n
        self.C = C.to(work).reshape(size.b * c, q, size.g, size.n).transpose(1, 2).reshape(-1, q, size.n)
        # In float64: the sum may reach hundreds where a token forgets everything, and float32's rounding of it would be a
        # relative error of 1e-5 and more in the decay between the tokens after it.
        a = (dt.double() * A.double()).reshape(size.b * c, q, size.h).cumsum(1)
        last = a[:, -1:]
        self.entering = a.exp().to(work)[..., None]  # of the state that enters, at each token
        self.leaving = (last - a).exp().to(work)[..., None]  # of each token, at the chunk's end
        self.through = last.exp().to(work).view(size.b, c, size.h, 1, 1)  # of the state, from end to end
        a = a.transpose(1, 2).contiguous()
        decay = torch.empty(*a.shape, a.shape[-1], dtype=work, device=x.device)
        torch.sub(a[..., :, None], a[..., None, :], out=decay)
        # Above the diagonal the exponent is positive and exp could overflow; there the scores are 0.
        self.decay = decay.clamp_(max=0).exp_().view(len(self.B), -1, *decay.shape[2:])  # b*c*g r q q
        scores = (self.C @ self.B.transpose(1, 2)).tril_()[:, None]  # b*c*g 1 q q: once per group
        self.matrix = (scores * self.decay).flatten(0, 1)  # b*c*h q q: the chunks' own mixing matrices

    def grouped(self, m: Tensor) -> Tensor:
        """(b * c, q, h, p) -> (b * c * g, q, r * p)."""
        return m.reshape(*m.shape[:2], self.size.g, -1).transpose(1, 2).flatten(0, 1)

    def ungrouped(self, m: Tensor) -> Tensor:
        """The inverse of `grouped`."""
        m = m.view(-1, self.size.g, *m.shape[1:]).transpose(1, 2)
        return m.reshape(*m.shape[:2], self.size.h, self.size.p)

    def heads(self, m: Tensor) -> Tensor:
        """(b * c, q, h, p) -> (b * c * h, q, p)."""
        return m.transpose(1, 2).flatten(0, 1)

    def unheads(self, m: Tensor) -> Tensor:
        """The inverse of `heads`."""
        return m.view(-1, self.size.h, *m.shape[1:]).transpose(1, 2)


class _ChunkedSSDScan(torch.autograd.Function):
    """See `ssd_scan`. One document a row; chunk_size is not used, since the result does not depend on it."""

    @staticmethod
    def forward(ctx: Any, x, dt, A, B, C, D, initial_state, seq_idx, chunk_size):
        size, keep = _Sizes.of(x, B), any(ctx.needs_input_grad)
        state = x.new_zeros(size.b, size.h, size.p, size.n, dtype=size.work)
        if initial_state is not None:
            state += initial_state
        y, saved = torch.empty_like(x, dtype=result_dtype(x), memory_format=torch.contiguous_format), []
        skip = None if D is None else D.to(size.work)[:, None]
        with own_precision(x):
            for part, c in size.segments(x.device):
                s = _Segment(size, c, x[:, part], dt[:, part], A, B[:, part], C[:, part])
                added = (s.grouped(s.xd * s.leaving).transpose(1, 2) @ s.B).view(size.b, c, size.h, size.p, size.n)
                entering = torch.empty_like(added)
                for i in range(c):
                    entering[:, i] = state
                    state = torch.addcmul(added[:, i], state, s.through[:, i])
                entering = entering.view(size.b * c * size.g, -1, size.n)
                out = s.unheads(s.matrix @ s.heads(s.xd))
                out = torch.addcmul(out, s.ungrouped(s.C @ entering.transpose(1, 2)), s.entering)
                out = out if skip is None else out.addcmul_(s.x, skip)
                y[:, part] = out.reshape(size.b, -1, size.h, size.p)
                saved.append(entering if keep else None)
        ctx.save_for_backward(x, dt, A, B, C, D, *saved)
        ctx.dtype = None if initial_state is None else initial_state.dtype
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy, dstate):
        x, dt, A, B, C, D, *saved = ctx.saved_tensors
        size = _Sizes.of(x, B)
        dstate = dstate.to(size.work)
        dx, ddt, dB, dC = (torch.empty_like(m, memory_format=torch.contiguous_format) for m in (x, dt, B, C))
        dA, dD = torch.zeros_like(A, dtype=torch.double), None if D is None else torch.zeros_like(D, dtype=torch.double)
        skip = None if D is None else D.to(size.work)[:, None]
        with own_precision(x):
            for (part, c), entering in reversed(list(zip(size.segments(x.device), saved, strict=True))):
                s = _Segment(size, c, x[:, part], dt[:, part], A, B[:, part], C[:, part])
                g = dy[:, part].to(size.work).reshape(s.x.shape).contiguous()
                heads, matrix = s.heads(g), s.matrix
                if dD is not None:
                    dD += _dot(g, s.x).sum((0, 1))
                # Through the states: of each chunk, the gradient of the one that leaves.
                weighted = s.grouped(g * s.entering)
                gathered = (weighted.transpose(1, 2) @ s.C).view(size.b, c, size.h, size.p, size.n)
                leaving = torch.empty_like(gathered)
                for i in reversed(range(c)):
                    leaving[:, i] = dstate
                    dstate = torch.addcmul(gathered[:, i], dstate, s.through[:, i])
                dthrough = (leaving * entering.view_as(leaving)).mul_(s.through).sum((-1, -2), dtype=torch.double)
                leaving = leaving.view_as(entering)
                dxd = s.ungrouped(s.B @ leaving.transpose(1, 2)).mul_(s.leaving)
                db, dc = s.grouped(s.xd * s.leaving) @ leaving, weighted @ entering
                # da: each decay's gradient times the decay, which is what reaches its logarithm.
                da = _dot(s.xd, dxd).neg_()
                da[:, -1] += dthrough.view(da[:, -1].shape) - da.sum(1)
                da += _dot(s.ungrouped(weighted), s.ungrouped(s.C @ entering.transpose(1, 2)))
                # Within the chunk. The diagonal's decay is 1 whatever a is; leaving it out spares the difference of two large
                # sums.
                dmatrix = heads @ s.heads(s.xd).transpose(1, 2)
                dscores = (dmatrix.view_as(s.decay) * s.decay).sum(1).tril_()
                dc += dscores @ s.B
                db += dscores.transpose(1, 2) @ s.C
                dxd += s.unheads(matrix.transpose(1, 2) @ heads)
                along = dmatrix.mul_(matrix).tril_(-1)
                da += s.unheads((along.sum(2, dtype=torch.double) - along.sum(1, dtype=torch.double))[..., None])[..., 0]
                dlog = da.flip(1).cumsum(1).flip(1)
                dA += (dlog * s.dt[..., 0]).sum((0, 1))
                ddt[:, part] = ((dxd * s.x).sum(-1) + dlog * A.double()).view(size.b, -1, size.h)
                dxd *= s.dt
                dxd = dxd if skip is None else dxd.addcmul_(g, skip)
                dx[:, part] = dxd.reshape(size.b, -1, size.h, size.p)
                for grad, m in ((dB, db), (dC, dc)):
                    grad[:, part] = m.view(-1, size.g, *m.shape[1:]).transpose(1, 2).reshape(size.b, -1, size.g, size.n)
        return (
            dx, ddt, dA.to(A.dtype), dB, dC, None if dD is None else dD.to(D.dtype),
            None if ctx.dtype is None else dstate.to(ctx.dtype), None, None,
        )  # fmt: skip


chunked_scan = _ChunkedSSDScan.apply


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Over the last dimension, summed in float64."""
    return (left * right).sum(-1, dtype=torch.double)
