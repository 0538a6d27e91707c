"""The gated delta rule against its definition, token by token, in float64; and what its grafts compute."""

import math

import pytest
import torch
from torch import Tensor

from surgery.modeling.delta import SHARPNESS
from surgery.modeling.delta_reference import EPS, delta_rule, delta_step
from surgery.modeling.packing import Packing
from surgery.records.plan import Plan, Start
from surgery.splicing.splice import splice
from tests.surgery.modeling.stock_bases import make_base

CHANNELS = pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])


def make_inputs(per_channel: bool, t: int = 37, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, log_decay, beta for 2 rows, 4 heads with 2 pairs of queries and keys, n = 8, p = 5."""
    torch.manual_seed(0)
    q, k = torch.randn(2, t, 2, 8), torch.randn(2, t, 2, 8)
    decay = -torch.rand(2, t, 4, 8) if per_channel else -torch.rand(2, t, 4)
    return [m.to(dtype) for m in (q, k, torch.randn(2, t, 4, 5), decay, 2 * torch.rand(2, t, 4))]


def defined(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = (I - beta k k^T) diag(a) S + beta k v^T, y = S^T q / sqrt(n)."""
    b, t, h, p = v.shape
    n, state, out = k.shape[-1], v.new_zeros(b, h, k.shape[-1], p), []
    q, k = (m / (m.square().sum(-1, keepdim=True) + EPS).sqrt() for m in (q, k))
    q, k = (m.repeat_interleave(h // m.shape[2], 2) for m in (q, k))
    decay = decay if decay.dim() == 4 else decay[..., None].expand(-1, -1, -1, n)
    for s in range(t):
        erase = torch.eye(n, dtype=v.dtype) - beta[:, s, :, None, None] * k[:, s, :, :, None] * k[:, s, :, None]
        state = erase @ (decay[:, s, :, :, None].exp() * state)
        state = state + beta[:, s, :, None, None] * k[:, s, :, :, None] * v[:, s, :, None]
        out.append((state * q[:, s, :, :, None]).sum(-2) / n**0.5)
    return torch.stack(out, 1), state


@CHANNELS
def test_the_scan_is_the_recursion(per_channel: bool) -> None:
    inputs = make_inputs(per_channel)
    y, state = delta_rule(*inputs)
    want, last = defined(*inputs)
    torch.testing.assert_close(y, want, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(state, last, atol=1e-11, rtol=1e-11)


@CHANNELS
def test_parts_and_steps_go_on_where_the_state_was(per_channel: bool) -> None:
    inputs = make_inputs(per_channel)
    whole, last = delta_rule(*inputs)
    first, state = delta_rule(*(m[:, :19] for m in inputs))
    second, state = delta_rule(*(m[:, 19:30] for m in inputs), state)
    steps = [delta_step(state, *(m[:, t] for m in inputs)) for t in range(30, 37)]
    torch.testing.assert_close(torch.cat([first, second, torch.stack(steps, 1)], 1), whole, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(state, last, atol=1e-11, rtol=1e-11)


@CHANNELS
def test_packed_documents_are_alone(per_channel: bool) -> None:
    inputs = make_inputs(per_channel)
    packing = Packing.of(torch.tensor([0] * 9 + [1] * 28).expand(2, -1))
    y, _ = delta_rule(*inputs, packing=packing)
    alone = torch.cat([delta_rule(*(m[:, part] for m in inputs))[0] for part in (slice(0, 9), slice(9, 37))], 1)
    torch.testing.assert_close(y, alone, atol=1e-11, rtol=1e-11)


@CHANNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float64(per_channel: bool, dtype: torch.dtype) -> None:
    inputs = [m.to(dtype) for m in make_inputs(per_channel)]
    want, _ = defined(*(m.double() for m in inputs))
    y, state = delta_rule(*inputs)
    assert state is not None
    assert state.dtype == torch.float32
    assert (y.double() - want).abs().max() < 8 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"])
def test_a_graft_is_the_formula_at_its_start(name: str) -> None:
    """y = softmax([sigma tau SHARPNESS q . k + log beta, b]) with the base's own q and k, of length 1, mixed by the gate."""
    base, hidden = make_base(name), torch.randn(1, 9, 32, dtype=torch.float64)
    start = Start(sign=-1, tau=0.7, null=0.3)
    mixer = splice(base, Plan(sites=("L1.H3",), starts={"L1.H3": start}, gate=0.6)).mixer_at(1)
    streams = mixer.project(hidden)
    own = mixer.scan(streams)
    got = mixer.graft(lambda: mixer, hidden, streams, own)
    pair = 3 * mixer.n_groups // mixer.num_heads
    q, k = (m[0, :, pair] for m in (streams.q, streams.k))
    q, k = (m / (m.square().sum(-1, keepdim=True) + EPS).sqrt() for m in (q, k))
    scores = -start.tau * SHARPNESS * q @ k.T + streams.write[0, :, 3].log()
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf)
    p = torch.cat([scores, torch.full((9, 1), 0.3, dtype=torch.float64)], 1).softmax(-1)
    m = 1 - p[:, -1:]
    want = (1 - 0.6 * m) * own[0, :, 3] - 0.6 * p[:, :-1] @ streams.x[0, :, 3]
    torch.testing.assert_close(got[0, :, 3], want, atol=1e-6, rtol=1e-6)
    assert torch.equal(got[:, :, :3], own[:, :, :3])
