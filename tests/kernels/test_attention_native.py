"""Graft attention in C (attention.c) beside the reference in float64, around its blocks of 64 queries and 64 keys."""

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from surgery.kernels.attention_native import FEW, attend_native
from surgery.kernels.dispatch import KernelError
from surgery.runtime.timing import peak_bytes
from tests.kernels.inputs import assert_near
from tests.kernels.test_attention import gradients, make, padding

CPU = torch.device("cpu")
U = 2.0**-24  # the largest relative error of a rounding in float32
few = settings(deadline=None, max_examples=15)
lengths = st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 96, 128, 130, 200])
widths = st.sampled_from([1, 3, 16, 17, 31, 33, 64, 129])


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    native = GRAFT_ATTENTION.backends["native"]
    if reason := GRAFT_ATTENTION.why_not(native, *GRAFT_ATTENTION.example(CPU, torch.float32)):
        pytest.skip(reason)


def inputs() -> st.SearchStrategy:
    numbers = {"b": st.integers(1, 2), "pairs": st.integers(1, 3), "per_pair": st.integers(1, 2)}
    return st.builds(make, t=lengths, past=lengths | st.just(0), w=widths, p=widths, seed=st.integers(0, 2**16), **numbers)


@few
@given(qkv=inputs(), share=st.sampled_from([1.0, 0.9, 0.01, 0.0]), pads=st.integers(0, 150), seed=st.integers(0, 2**16))
def test_any_length_width_and_mask(qkv, share, pads, seed):
    """Forward and gradients; padding on the left of one row, holes in all of them, or nothing left at all."""
    q, k, v = qkv
    exists = torch.rand(len(k), k.shape[2], generator=torch.Generator().manual_seed(seed)) < share
    exists[0, :pads] = False
    for mask in (exists, None):
        y = graft_attention(q, k, v, mask, backend="native")
        exact = graft_attention(q.double(), k.double(), v.double(), mask, backend="reference")
        assert_near(y, exact)
        truths = gradients(q.double(), k.double(), v.double(), mask, "reference")
        for actual, truth in zip(gradients(q, k, v, mask, "native"), truths, strict=True):
            # Of numbers of order 1. Where a query sees one key alone, its gradient is their difference, which is 0.
            assert_near(actual, truth, floor=math.sqrt(truth.numel()))


@pytest.mark.parametrize("sharp", [1.0, 10.0])
def test_error_bounds(sharp):
    """Each number within what rounding can do. A score is a sum of w products, so it is off by at most (w + 3) U sum |q_c k_c|
    (with a rounding for the unit of ln 2), and by U times itself and the peak, which is taken from it. The exponential is off
    by 2e-7. A weight, and the sum of weights, carry the largest error of a score of the row, each; and a sum over s keys in
    blocks of 64 is off by 64 + s / 64 roundings."""
    q, k, v = make(b=1, pairs=2, per_pair=1, t=200, past=30, w=33, p=17, seed=0)
    q = sharp * q
    y, exact = (graft_attention(*qkv, backend=name) for name, qkv in (
        ("native", (q, k, v)), ("reference", (q.double(), k.double(), v.double()))
    ))  # fmt: skip
    scores, sizes = (a @ b.transpose(-1, -2) for a, b in ((q.double(), k.double()), (q.double().abs(), k.double().abs())))
    causal = torch.ones(200, 230).tril(30).bool()
    scores, sizes = scores.masked_fill(~causal, -torch.inf), sizes.masked_fill(~causal, 0)
    off = (33 + 3) * U * sizes + 3 * U * sizes.amax(-1, keepdim=True)
    weights = scores.softmax(-1)
    relative = 2 * (torch.expm1(off.amax(-1, keepdim=True)) + 2e-7 + (64 + 230 / 64) * U)
    bound = (relative * (weights @ v.double().abs())).transpose(1, 2)
    assert ((y - exact).abs() <= bound).all()
    assert bound.max() < 1e-2  # no bound that anything would meet


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    """Within what rounding the result to 16 bits does: within it is float32."""
    q, k, v = (m.to(dtype) for m in make(b=2, pairs=2, per_pair=2, t=70, past=5, w=17, p=16, seed=1))
    y = graft_attention(q, k, v, backend="native")
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    exact = graft_attention(q.double(), k.double(), v.double(), backend="reference")
    assert ((y.double() - exact).abs() <= eps * exact.abs() + 1e-5).all()
    truths = gradients(q.double(), k.double(), v.double(), None, "reference")
    for actual, truth in zip(gradients(q, k, v, None, "native"), truths, strict=True):
        assert actual.dtype == dtype
        assert_near(actual, truth, 4 * eps)


@pytest.mark.parametrize("pairs", [1, 3, 9])
def test_the_number_of_threads_changes_nothing(pairs):
    q, k, v = make(b=1, pairs=pairs, per_pair=1, t=300, past=20, w=17, p=33, seed=2)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append([graft_attention(q, k, v, backend="native"), *gradients(q, k, v, None, "native")])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_gradients_that_nobody_needs_change_no_other():
    args = make(b=1, pairs=2, per_pair=1, t=80, past=0, w=9, p=5, seed=3)

    def computed(which: Sequence[bool]) -> list[Tensor]:
        own = [m.clone().requires_grad_(one) for m, one in zip(args, which, strict=True)]
        y = attend_native(*own, None)
        return list(torch.autograd.grad(y, [m for m in own if m.requires_grad], torch.ones_like(y)))

    whole = computed([True] * 3)
    for which in product([False, True], repeat=3):
        expected = [m for m, one in zip(whole, which, strict=True) if one]
        assert not any(which) or all(map(torch.equal, computed(which), expected))


def test_strides_are_taken_as_they_are():
    """Parts of wider tensors, expanded ones, and ones whose last dimension is not contiguous."""
    g = torch.Generator().manual_seed(4)
    wide = torch.randn(2, 70, 3, 40, generator=g).transpose(1, 2)
    cases = [
        (wide[..., :17], wide[..., 20:37], wide[..., 3:36]),
        (wide[:, :1, :, :9].expand(-1, 3, -1, -1), wide[..., 1:10], wide[:, :, :1].expand(-1, -1, 70, -1)),
        (wide[..., :12:2], wide[..., 12:24:2], wide.transpose(-1, -2).contiguous().transpose(-1, -2)),
    ]
    for q, k, v in cases:
        copies = [m.contiguous() for m in (q, k, v)]
        assert torch.equal(graft_attention(q, k, v, backend="native"), graft_attention(*copies, backend="native"))
        assert all(map(torch.equal, gradients(q, k, v, None, "native"), gradients(*copies, None, "native")))


def test_extreme_scores():
    """Peaks that grow from block to block by more than float32 can hold as a factor, and equal ones."""
    t = 200
    q, k, v = (
        torch.ones(1, 1, t, 1),
        torch.zeros(1, 1, t, 1),
        torch.randn(1, 1, t, 5, generator=torch.Generator().manual_seed(5)),
    )
    k[0, 0, ::70] = torch.tensor([[-1e4], [1e3], [1e30]])
    y = graft_attention(q, k, v, backend="native")
    exact = graft_attention(q.double(), k.double(), v.double(), backend="reference")
    assert_near(y, exact)
    even = graft_attention(q, torch.full_like(k, -1e30), v, backend="native")
    assert_near(even, v.double().cumsum(2).transpose(1, 2) / torch.arange(1, t + 1)[:, None, None])


@pytest.mark.parametrize(("which", "broken"), [("k", torch.nan), ("v", torch.nan), ("v", torch.inf)])
def test_numbers_that_are_not_finite_are_seen(which, broken):
    """By every query that attends to them; blocks before them stay as they were."""
    q, k, v = make(b=1, pairs=1, per_pair=1, t=200, past=0, w=4, p=3, seed=6)
    whole = graft_attention(q, k, v, backend="native")
    {"k": k, "v": v}[which][0, 0, 130] = broken
    y = graft_attention(q, k, v, backend="native")
    assert torch.equal(y[:, :128], whole[:, :128])
    assert not y[:, 130:].isfinite().any()


def test_no_more_than_a_block_of_scores_is_held():
    """What a call holds at once, forward and backward, grows with the length and not with its square."""

    def peak(t: int) -> float:
        q, k, v = (m.requires_grad_() for m in make(b=1, pairs=2, per_pair=1, t=t, past=0, w=4, p=4, seed=9))
        return peak_bytes(lambda: graft_attention(q, k, v, backend="native").sum().backward(), CPU)

    assert peak(1024) < 2.5 * peak(512)


def test_what_it_refuses():
    q, k, v = make(b=2, pairs=1, per_pair=1, t=12, past=0, w=4, p=3, seed=7)
    for reason, call in {
        "its mask says which keys exist": (q, k, v, padding(2, 12, 12, [0])),
        "it computes in float32": (q.double(), k.double(), v.double(), None),
        "a key for every query": (q, k[:, :, :5], v[:, :, :5], None),
    }.items():
        with pytest.raises(KernelError, match=reason):
            graft_attention(*call, backend="native")
    with pytest.raises(ValueError, match="a tensor of shape"):
        graft_attention(q, k[..., :3], v, backend="native")


def test_it_serves_a_cpu_except_for_a_few_queries():
    q, k, v = make(b=1, pairs=1, per_pair=1, t=FEW, past=3, w=4, p=3, seed=8)
    assert GRAFT_ATTENTION.choose(q, k, v, None).name == "native"
    assert GRAFT_ATTENTION.choose(q[:, :, 1:], k, v, None).name == "sdpa"
    assert GRAFT_ATTENTION.choose(q.double(), k.double(), v.double(), None).name == "sdpa"
    assert GRAFT_ATTENTION.choose(q, k, v, padding(1, FEW, FEW + 3, [0])).name == "sdpa"
