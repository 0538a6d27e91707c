"""The selective scan in PyTorch, on any device and in any precision, in bounded memory.

The sequence is taken in segments and the channels in blocks, so the largest tensors, (b, segment, n, channels), never grow
with the length of the text. A segment is divided into chunks. The recurrence runs over the positions within a chunk, for all
chunks at once, and then adds to each chunk the state that entered it. That takes about twice as many steps as the square root
of the segment's length. Products of decays are at most 1 and nothing is divided by them, so a token that forgets everything
(decay 0) causes no overflow.

The backward pass is written by hand. The forward pass keeps only the states that entered the segments. From them the backward
pass computes each segment again, and runs the same recurrence from the end, which gives the gradients by the states.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import own_precision, result_dtype

SEGMENT = 256  # tokens
CPU_BLOCK, GPU_BLOCK = 2**19, 2**25  # numbers in a block: what fits a CPU's cache; what keeps a GPU busy


def run(x, dt, A, B, C, D, initial_state) -> tuple[Tensor, Tensor]:
    """Arguments and results as in selective_scan."""
    inputs = [m for m in (x, dt, A, B, C, D, initial_state) if m is not None]
    work = torch.promote_types(torch.float32, max((m.dtype for m in inputs), key=lambda dtype: dtype.itemsize))
    wide, dt, A, B, C = (m.to(work) for m in (x, dt, A, B, C))
    state = wide.new_zeros(x.shape[0], *A.shape) if initial_state is None else initial_state.to(work)
    y, state = _ChunkedScan.apply(wide, dt, A, B, C, state)
    return (y if D is None else y + D.to(work) * wide).to(result_dtype(x)), state


class _ChunkedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, initial):
        y, final = torch.empty_like(x), torch.empty_like(initial)
        starts = range(0, x.shape[1], SEGMENT)
        entering = x.new_empty(len(starts), *initial.shape) if any(ctx.needs_input_grad) else None
        with own_precision(x):
            for b, d in _blocks(x, A):
                a, state = A[d].T.contiguous(), initial[b, d].transpose(1, 2).contiguous()
                for i, start in enumerate(starts):
                    if entering is not None:
                        entering[i, b, d] = state.transpose(1, 2)
                    t = slice(start, start + SEGMENT)
                    u, step = (x[b, t, d] * dt[b, t, d]).contiguous(), dt[b, t, d].contiguous()
                    states, state = _states(u, step, a, B[b, t], state)
                    y[b, t, d] = states.mul_(C[b, t, :, None]).sum(2)
                final[b, d] = state.transpose(1, 2)
        ctx.save_for_backward(x, dt, A, B, C, entering)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal):
        x, dt, A, B, C, entering = ctx.saved_tensors
        dx, ddt, dinitial = torch.empty_like(x), torch.empty_like(dt), torch.empty_like(dfinal)
        dA, dB, dC = (torch.zeros_like(m) for m in (A, B, C))
        starts = range(0, x.shape[1], SEGMENT)
        with own_precision(x):
            for b, d in _blocks(x, A):
                a, g = A[d].T.contiguous(), dfinal[b, d].transpose(1, 2).contiguous()
                for i in reversed(range(len(starts))):
                    t = slice(starts[i], starts[i] + SEGMENT)
                    part, step, by_y = (m[b, t, d].contiguous() for m in (x, dt, dy))
                    state = entering[i, b, d].transpose(1, 2).contiguous()
                    dx[b, t, d], ddt[b, t, d], by_A, by_B, by_C, g = _segment_gradients(
                        part, step, by_y, a, B[b, t], C[b, t], state, g
                    )
                    dA[d] += by_A
                    dB[b, t] += by_B
                    dC[b, t] += by_C
                dinitial[b, d] = g.transpose(1, 2)
        return dx, ddt, dA, dB, dC, dinitial


def _blocks(x: Tensor, A: Tensor):
    """Slices of the batch and of the channels."""
    (b, t, d), n = x.shape, A.shape[1]
    # Channels of a block, those of all its sequences together.
    room = (CPU_BLOCK if x.device.type == "cpu" else GPU_BLOCK) // (n * min(t, SEGMENT))
    channels = min(d, max(room, 32))
    sequences = max(1, room // channels)
    for i in range(0, b, sequences):
        for j in range(0, d, channels):
            yield slice(i, i + sequences), slice(j, j + channels)


def _states(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """All states (b, t, n, d) of a segment, and the last; from u = dt x and dt (b, t, d), A (n, d), B (b, t, n), and the state
    (b, n, d) before."""
    states = B[..., None] * u[:, :, None]
    last = _recur(_decay(A, dt), states, state)
    return states, last


def _decay(A: Tensor, dt: Tensor) -> Tensor:
    return (A * dt[:, :, None]).exp_()


def _recur(decay: Tensor, v: Tensor, state: Tensor, reverse: bool = False) -> Tensor:
    """v_t <- v_t + decay_t v_{t-1} in place, in (b, t, n, d), with v_{-1} = state (b, n, d); in reverse, t-1 is t+1.
    Destroys `decay`. Returns the last v."""
    t = v.shape[1]
    chunks = max(1, math.isqrt(t // 2))
    q = t // chunks
    if rest := t - chunks * q:  # tokens that fill no chunk come last
        cut = (slice(rest, None), slice(rest)) if reverse else (slice(chunks * q), slice(chunks * q, None))
        for part in cut:
            state = _recur(decay[:, part], v[:, part], state, reverse)
        return state
    decay, v = (m.unflatten(1, (chunks, q)) for m in (decay, v))
    decays, vs = ([*m.unbind(2)][:: -1 if reverse else 1] for m in (decay, v))  # by position; each (b, chunks, n, d)
    for i in range(1, q):
        vs[i].addcmul_(decays[i], vs[i - 1])
        decays[i].mul_(decays[i - 1])  # from here on: the product of the decays since the chunk began
    entering = torch.empty_like(vs[0])
    for k in range(chunks - 1, -1, -1) if reverse else range(chunks):
        entering[:, k] = state
        state = torch.addcmul(vs[-1][:, k], decays[-1][:, k], state)
    v.addcmul_(decay, entering[:, :, None])
    return state


def _segment_gradients(x, dt, dy, A, B, C, state, g) -> tuple[Tensor, ...]:
    """By x, dt, A, B, C and the state before the segment. g (b, n, d): the gradient by the state after it.

    With g_t = C_t dy_t + a_{t+1} g_{t+1} the gradient by S_t, and q_t = g_t a_t S_{t-1} that by the exponent A dt:
    dC_t = sum_c dy_t S_t, dB_t = sum_c u_t g_t, du_t = sum_n B_t g_t, dA = sum_t dt_t q_t."""
    u = dt * x
    states, _ = _states(u, dt, A, B, state)
    q = _decay(A, dt)
    first = q[:, 0].clone()
    q[:, 1:] *= states[:, :-1]
    q[:, 0] *= state
    by_C = states.mul_(dy[:, :, None]).sum(-1)
    gradients = torch.mul(C[..., None], dy[:, :, None], out=states)
    later = _decay(A, dt.roll(-1, 1))
    later[:, -1] = 1  # g is the gradient by the last state itself
    g = first * _recur(later, gradients, g, reverse=True)
    by_u = (gradients * B[..., None]).sum(2)
    q *= gradients
    by_B = gradients.mul_(u[:, :, None]).sum(-1)
    by_A = (q * dt[:, :, None]).sum((0, 1)).T
    by_dt = x * by_u + q.mul_(A).sum(2)
    return dt * by_u, by_dt, by_A, by_B, by_C, g
