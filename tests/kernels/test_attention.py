"""The attention of grafts against a loop over heads and queries in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from tests.kernels.inputs import assert_near

few = settings(deadline=None, max_examples=15)
EXACT = ("sdpa", "reference")  # those that serve on any machine, and masks of pairs; GPUs' have tests of their own
BACKENDS = ("native", *EXACT)


@pytest.fixture(autouse=True)
def _serving(request):
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if backend == "native":
        example = GRAFT_ATTENTION.example(torch.device("cpu"), torch.float32)
        if reason := GRAFT_ATTENTION.why_not(GRAFT_ATTENTION.backends[backend], *example):
            pytest.skip(reason)


def make(*, b: int, pairs: int, per_pair: int, t: int, past: int, w: int, p: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float32; w, the width of q and k, is not p, that of v."""
    g = torch.Generator().manual_seed(seed)
    s = t + past
    q, k = torch.randn(b, pairs, t, w, generator=g), torch.randn(b, pairs, s, w, generator=g)
    return q, k, torch.randn(b, pairs * per_pair, s, p, generator=g)


def inputs(**limits: tuple[int, int]) -> st.SearchStrategy:
    limits = {"b": (1, 2), "pairs": (1, 3), "per_pair": (1, 3), "t": (1, 12), "past": (0, 7), "w": (1, 9), "p": (1, 6)} | limits
    return st.builds(make, seed=st.integers(0, 2**16), **{name: st.integers(*between) for name, between in limits.items()})


def padding(b: int, t: int, s: int, pads: list[int]) -> Tensor:
    """The mask of a batch padded on the left: causal, and nobody attends to padding. Padding's own rows see nothing."""
    mask = torch.ones(t, s, dtype=torch.bool).tril(s - t).repeat(b, 1, 1, 1)
    for i in range(b):
        mask[i, :, :, : pads[i % len(pads)]] = False
    return mask


def loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Query by query, head by head, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    b, heads, s, p = v.shape
    pairs, t = q.shape[1:3]
    out = torch.zeros(b, t, heads, p, dtype=torch.double)
    for i in range(b):
        for head in range(heads):
            pair = head // (heads // pairs)
            for row in range(t):
                seen = torch.arange(s) <= row + s - t if mask is None else mask[i, 0, row]
                if seen.any():
                    weight = torch.softmax(k[i, pair, seen] @ q[i, pair, row], 0)
                    out[i, row, head] = weight @ v[i, head, seen]
    return out


def gradients(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> tuple[Tensor, ...]:
    q, k, v = (m.detach().clone().requires_grad_() for m in (q, k, v))
    y = graft_attention(q, k, v, mask, backend=backend)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    return torch.autograd.grad((y * weight).sum(), (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@few
@given(qkv=inputs())
def test_equals_a_loop(backend, qkv):
    y = graft_attention(*qkv, backend=backend)
    assert y.dtype == torch.float32
    assert_near(y, loop(*qkv))


@few
@given(inputs())
def test_bfloat16(qkv):
    q, k, v = (m.bfloat16() for m in qkv)
    y = graft_attention(q, k, v)
    assert y.dtype == torch.bfloat16
    assert_near(y, loop(q, k, v), 1e-2, floor=1)


@pytest.mark.parametrize("backend", EXACT)
@few
@given(qkv=inputs(), pads=st.none() | st.lists(st.integers(0, 12), min_size=1, max_size=2))
def test_left_padding(backend, qkv, pads):
    """Rows that may attend to nothing are 0 with a finite gradient, and do not disturb the others."""
    q, k, v = qkv
    mask = None if pads is None else padding(len(q), q.shape[2], k.shape[2], pads)
    assert_near(graft_attention(q, k, v, mask, backend=backend), loop(q, k, v, mask))
    exact = gradients(q.double(), k.double(), v.double(), mask, "reference")
    for actual, truth in zip(gradients(q, k, v, mask, backend), exact, strict=True):
        assert_near(actual, truth, floor=1)


@pytest.mark.parametrize("backend", BACKENDS)
@few
@given(qkv=inputs(), pads=st.none() | st.lists(st.integers(0, 12), min_size=1, max_size=2), seed=st.integers(0, 2**16))
def test_keys_that_do_not_exist(backend, qkv, pads, seed):
    """A mask (b, s) is causal by itself. Holes, or padding on the left."""
    q, k, v = qkv
    b, s, t = len(q), k.shape[2], q.shape[2]
    if pads is None:
        exists = torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 0.7
    else:
        exists = torch.stack([torch.arange(s) >= pads[i % len(pads)] for i in range(b)])
    mask = padding(b, t, s, [0]) & exists[:, None, None]
    y = graft_attention(q, k, v, exists, backend=backend)
    assert_near(y, loop(q, k, v, mask))
    exact = gradients(q.double(), k.double(), v.double(), mask, "reference")
    for actual, truth in zip(gradients(q, k, v, exists, backend), exact, strict=True):
        assert_near(actual, truth, floor=1)


@pytest.mark.parametrize("blocked", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("backend", EXACT)
def test_additive_mask(backend, blocked):
    q, k, v = make(b=2, pairs=2, per_pair=2, t=6, past=3, w=4, p=3, seed=0)
    allowed = padding(2, 6, 9, [0, 5])
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, blocked)
    y, expected = graft_attention(q, k, v, mask, backend=backend), loop(q, k, v, allowed)
    somewhere = allowed.any(-1)[:, 0]  # elsewhere the finite mask attends evenly, which is nobody's concern
    assert_near(y[somewhere], expected[somewhere])
    for gradient in gradients(q, k, v, mask, backend):
        assert gradient.isfinite().all()
