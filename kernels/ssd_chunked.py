"""The SSD scan in chunks, forward and backward (Mamba-2, arXiv 2405.21060, section 6), in plain PyTorch.

Within a chunk of Q tokens the scan is a masked product of Q x Q matrices; between chunks only the state travels. With a_i the
sum of A dt over the chunk's tokens up to i, S the state that enters and everything per head:

    y_i  = sum_{j<=i} exp(a_i - a_j) (C_i . B_j) dt_j x_j  +  exp(a_i) S C_i
    S'   = exp(a_Q) S + sum_j exp(a_Q - a_j) dt_j x_j B_j^T

What makes it several times faster than the usual chunked form on a CPU: chunks are short (32 or 64 tokens: the quadratic
part is what costs there) and done one after the other, so that everything that one chunk touches stays in the cache; C B^T is
formed once per *group*; and the products with the state, which are most of the work, run over all heads of a group as one large
matrix product. The backward pass is written out: it keeps only the state that enters each chunk and forms the rest again.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 32  # at least, so that the products are matrix products
CHUNK_ON_GPU = 256  # there a chunk's matrices are small work, and every launch costs


def chunked_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """See `ssd_scan`. `chunk_size` is not used: the result does not depend on it."""
    return _Scan.apply(x, dt, A, B, C, D, initial_state)


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
        return cls(*x.shape, *B.shape[2:], torch.promote_types(x.dtype, torch.float32))

    def chunks(self, device: torch.device) -> list[slice]:
        """Of equal length, nearly: 33 tokens make 17 and 16, not 32 and 1."""
        few_heads = (
            self.b * self.h <= 32
        )  # then matrices of twice the size still stay in a core's cache, and there are fewer calls
        count = -(-self.t // (CHUNK_ON_GPU if device.type != "cpu" else 2 * CHUNK if few_heads else CHUNK))
        ends = [self.t * i // count for i in range(count + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def grouped(self, m: Tensor) -> Tensor:
        """(b, q, h, p) -> (b * g, q, h / g * p)."""
        return m.reshape(self.b, -1, self.g, self.h // self.g * self.p).transpose(1, 2).flatten(0, 1)

    def ungrouped(self, m: Tensor) -> Tensor:
        """The inverse of `grouped`."""
        return m.view(self.b, self.g, -1, self.h // self.g * self.p).transpose(1, 2).reshape(self.b, -1, self.h, self.p)

    def heads(self, m: Tensor) -> Tensor:
        """(b, q, h, p) -> (b * h, q, p)."""
        return m.transpose(1, 2).flatten(0, 1)

    def unheads(self, m: Tensor) -> Tensor:
        """(b * h, q, p) -> (b, q, h, p)."""
        return m.view(self.b, self.h, -1, self.p).transpose(1, 2)


class _Chunk:
    """What both passes need of one chunk of q tokens."""

    def __init__(self, size: _Sizes, part: slice, x: Tensor, dt: Tensor, log: Tensor, B: Tensor, C: Tensor):
        q, work = part.stop - part.start, size.work
        self.x, self.dt = x[:, part].to(work), dt[:, part].to(work)[..., None]
        self.xd = self.x * self.dt  # b q h p
        self.B, self.C = (m[:, part].to(work).transpose(1, 2).reshape(-1, q, size.n) for m in (B, C))  # b*g q n
        # In float64: the sum may reach hundreds where a token forgets everything, and float32's rounding of it would be a
        # relative error of 1e-5 and more in the decay between the tokens after it.
        a = log[:, part].cumsum(1)  # b q h
        last = a[:, -1:]
        self.entering = a.exp().to(work)[..., None]  # of the state that enters, at each token
        self.leaving = (last - a).exp().to(work)[..., None]  # of each token, at the chunk's end
        self.through = last.exp().to(work).view(size.b * size.g, -1, 1, 1)  # of the state, from end to end
        a = a.transpose(1, 2).contiguous()
        decay = torch.empty(size.b, size.h, q, q, dtype=work, device=x.device)
        torch.sub(a[..., :, None], a[..., None, :], out=decay)
        # Above the diagonal the exponent is positive and exp could overflow; there the scores are 0.
        self.decay = decay.clamp_(max=0).exp_().view(size.b * size.g, -1, q, q)  # b*g r q q
        self.scores = (self.C @ self.B.transpose(1, 2)).tril_()[:, None]  # b*g 1 q q: once per group

    def matrix(self) -> Tensor:
        """The chunk's own mixing matrices, (b * h, q, q)."""
        return (self.scores * self.decay).flatten(0, 1)

    def carry(self, state: Tensor, size: _Sizes) -> Tensor:
        """(b * g, r * p, n): a state times the chunk's whole decay."""
        return (state.view(size.b * size.g, -1, size.p, size.n) * self.through).view_as(state)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dt, A, B, C, D, initial_state):  # type: ignore[no-untyped-def]
        size = _Sizes.of(x, B)
        log = dt.double() * A.double()
        shape = size.b * size.g, size.h // size.g * size.p, size.n
        keep = any(ctx.needs_input_grad)
        state = None if initial_state is None else initial_state.to(size.work).reshape(shape)
        y, entering = torch.empty_like(x, memory_format=torch.contiguous_format), []
        skip = None if D is None else D.to(size.work)[:, None]
        for part in size.chunks(x.device):
            chunk = _Chunk(size, part, x, dt, log, B, C)
            out = size.unheads(chunk.matrix() @ size.heads(chunk.xd))
            if state is not None:
                out = torch.addcmul(out, size.ungrouped(chunk.C @ state.transpose(1, 2)), chunk.entering)
            y[:, part] = out if skip is None else out.addcmul_(chunk.x, skip)
            entering.append(state if keep else None)
            added = size.grouped(chunk.xd * chunk.leaving).transpose(1, 2)
            state = added @ chunk.B if state is None else torch.baddbmm(chunk.carry(state, size), added, chunk.B)
        ctx.save_for_backward(x, dt, A, B, C, D, *entering)
        ctx.dtype = None if initial_state is None else initial_state.dtype
        return y, state.view(size.b, size.h, size.p, size.n)

    @staticmethod
    def backward(ctx: Any, dy, dstate):  # type: ignore[no-untyped-def, override]
        x, dt, A, B, C, D, *entering = ctx.saved_tensors
        size = _Sizes.of(x, B)
        log = dt.double() * A.double()
        dstate = dstate.to(size.work).reshape(size.b * size.g, -1, size.n)
        dx, ddt, dB, dC = (torch.empty_like(m, memory_format=torch.contiguous_format) for m in (x, dt, B, C))
        dA = torch.zeros_like(A, dtype=torch.double)
        dD = None if D is None else torch.zeros_like(D, dtype=size.work)
        skip = None if D is None else D.to(size.work)[:, None]
        for part, state in reversed(list(zip(size.chunks(x.device), entering, strict=True))):
            chunk = _Chunk(size, part, x, dt, log, B, C)
            g = dy[:, part].to(size.work).contiguous()
            heads, matrix = size.heads(g), chunk.matrix()
            if D is not None:
                dD += (g * chunk.x).sum((0, 1, 3))
            # Through the state that leaves. da: each decay's gradient times the decay, which is what reaches its logarithm.
            dxd = size.ungrouped(chunk.B @ dstate.transpose(1, 2)).mul_(chunk.leaving)
            db = size.grouped(chunk.xd * chunk.leaving) @ dstate
            da = _dot(chunk.xd, dxd).neg_()
            da[:, -1] -= da.sum(1)
            # Within the chunk. The diagonal's decay is 1 whatever a is; leaving it out spares the difference of two large sums.
            dmatrix = heads @ size.heads(chunk.xd).transpose(1, 2)
            dscores = (dmatrix.view_as(chunk.decay) * chunk.decay).sum(1).tril_()
            dc = dscores @ chunk.B
            db += dscores.transpose(1, 2) @ chunk.C
            dxd += size.unheads(matrix.transpose(1, 2) @ heads)
            along = (dmatrix * matrix).tril_(-1)
            da += (along.sum(2, dtype=torch.double) - along.sum(1, dtype=torch.double)).view(size.b, size.h, -1).transpose(1, 2)
            # Through the state that enters.
            weighted = size.grouped(g * chunk.entering)
            after = torch.baddbmm(chunk.carry(dstate, size), weighted.transpose(1, 2), chunk.C)
            if state is not None:
                dc += weighted @ state
                da += _dot(size.ungrouped(weighted), size.ungrouped(chunk.C @ state.transpose(1, 2)))
                da[:, -1] += (chunk.carry(state, size) * dstate).view(size.b, size.h, -1).sum(-1, dtype=torch.double)
            dstate = after
            dlog = da.flip(1).cumsum(1).flip(1)
            dA += (dlog * dt[:, part]).sum((0, 1))
            ddt[:, part] = (dxd * chunk.x).sum(-1) + dlog * A.double()
            dxd *= chunk.dt
            dx[:, part] = dxd if skip is None else dxd.addcmul_(g, skip)
            dB[:, part] = db.view(size.b, size.g, -1, size.n).transpose(1, 2)
            dC[:, part] = dc.view(size.b, size.g, -1, size.n).transpose(1, 2)
        dinitial = None if ctx.dtype is None else dstate.view(size.b, size.h, size.p, size.n).to(ctx.dtype)
        return dx, ddt, dA.to(A.dtype), dB, dC, None if D is None else dD.to(D.dtype), dinitial


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Over the last dimension, (b, q, h, p) -> (b, q, h), in float64."""
    return (left * right).sum(-1, dtype=torch.double)
