"""How calls are presented to FlashAttention, with a stand-in that demands what the real one does.

The real one is tested in test_triton_attention.py, on a GPU.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.kernels import flash_attention
from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from surgery.kernels.dispatch import Backend, KernelError, Operation
from surgery.kernels.flash_attention import Cut, attend, cut
from tests.kernels.inputs import assert_near
from tests.kernels.test_attention import loop, padding
from tests.kernels.test_triton_attention import Call, make, results

few = settings(deadline=None, max_examples=25)


def demand(q, k, v):
    """What FlashAttention checks, and what it takes for granted."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert q.shape[-1] == k.shape[-1] <= 256
    assert q.shape[-1] == v.shape[-1] or q.shape[-1] <= 64 or (128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128)
    assert q.shape[-2] == k.shape[-2] == v.shape[-2]
    for x in (q, k, v):
        assert x.shape[-1] % 8 == 0
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert not any(step % 8 for step in x.stride()[:-1])


def dense(q, k, v, *, softmax_scale, causal, deterministic):
    """(batch, length, heads, width), causal, aligned to the end."""
    assert softmax_scale == 1
    assert causal
    demand(q, k, v)
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    t, s = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(2, 3)).masked_fill(~torch.ones(t, s, dtype=torch.bool).tril(s - t), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).bfloat16()


def packed(q, k, v, begins, begins_k, longest, longest_k, **options):
    """(all tokens, heads, width); begins: where the sequences begin, and the end of the last."""
    assert begins.dtype == begins_k.dtype == torch.int32
    assert begins.diff().max() <= longest
    assert begins_k.diff().max() <= longest_k
    ranges = [[range(a, b) for a, b in pairwise(x)] for x in (begins.tolist(), begins_k.tolist())]
    parts = [dense(q[None, a], k[None, b], v[None, b], **options)[0] for a, b in zip(*ranges, strict=True) if len(a)]
    return torch.cat(parts), torch.empty(0)  # early builds return the log-sum-exp too


def through_flash(differ):
    def run(q, k, v, mask):
        return attend(dense, packed, q, k, v, mask, cut(q.shape[-1], v.shape[-1], differ))

    return run


calls = st.builds(
    make,
    b=st.integers(1, 3),
    pairs=st.integers(1, 3),
    t=st.integers(1, 9),
    past=st.integers(0, 5),
    w=st.sampled_from([3, 8, 17, 129, 144, 250]),
    dv=st.sampled_from([1, 4, 16, 64, 100, 300, 700]),
    left=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**16),
)


@few
@given(calls, st.booleans())
def test_equals_a_loop(call, differ):
    if call.mask is not None:
        call.mask[:, -1] = True  # at least one token: packing nothing at all is not demanded of the kernels
    call = call.to(torch.bfloat16)
    mask = None if call.mask is None else padding(len(call.q), call.q.shape[2], call.k.shape[2], [0]) & call.mask[:, None, None]
    exact = Call(*(x.double() for x in call[:3]), None)
    expected = results(lambda q, k, v, _: loop(q, k, v, mask).transpose(1, 2), exact)
    # The gradients of q and k are sums over the pieces, each rounded to bfloat16.
    tolerances = (1e-2, 5e-2, 5e-2, 1e-2)
    for actual, truth, tolerance in zip(results(through_flash(differ), call), expected, tolerances, strict=True):
        assert_near(actual, truth, tolerance, floor=1)


def test_strides_that_it_would_read_wrongly():
    call = make(w=17, dv=9).to(torch.bfloat16)
    odd = call._replace(q=call.q[..., 1:], k=call.k[..., 1:], v=call.v[..., 1:])
    assert_near(through_flash(False)(*odd), loop(*odd[:3]).transpose(1, 2), 1e-2)


def test_queries_and_keys_are_not_copied_for_pieces():
    seen = []

    def watch(q, k, v, **options):
        seen.extend((q, k))
        return dense(q, k, v, **options)

    q, k, v, _ = make(w=128, dv=384).to(torch.bfloat16)
    attend(watch, packed, q, k, v, None, cut(128, 384))
    assert [x.shape[2] for x in seen] == [3, 3]
    assert [x.data_ptr() for x in seen] == [q.data_ptr(), k.data_ptr()]


def test_cuts():
    assert cut(128, 128) == Cut(128, 128, 1)
    assert cut(129, 128) == Cut(136, 136, 1)
    assert cut(129, 128, differ=True) == Cut(136, 128, 1)
    assert cut(64, 400, differ=True) == Cut(64, 400, 1)
    assert cut(129, 1536).work(2) == 6 * 2 * 256
    for w in (8, 17, 129, 256):
        for dv in (4, 64, 300, 1536):
            for differ in (False, True):
                query, value, pieces = cut(w, dv, differ)
                assert query >= w
                assert pieces * value >= dv
                assert query % 8 == value % 8 == 0


def declined(version, w, dv, t=1024):
    q, k, v = (torch.empty(1, 1, t, width, dtype=torch.bfloat16, device="meta") for width in (w, w, dv))
    return bool(flash_attention._declines(version, q, k, v, None))


def test_when_it_is_preferred():
    assert not declined(2, 64, 64)
    assert not declined(2, 128, 128)
    assert not declined(3, 129, 128)
    assert declined(2, 129, 64)
    assert declined(2, 129, 128)
    assert declined(3, 17, 4)
    assert declined(3, 129, 128, t=1)
    assert not declined(2, 128, 128, t=1)


def test_a_backend_that_declines_serves_when_asked(monkeypatch):
    monkeypatch.setattr(Operation, "registry", {})
    modest = Backend("modest", lambda x: (x, "modest"), declines=lambda x: "too short" if len(x) < 2 else None)
    shy = Backend("shy", lambda x: (x, "shy"), on_request=True)
    op = Operation("op", shy, modest, Backend("last", lambda x: (x, "last")), example=lambda *_: (torch.ones(3),))
    assert op(torch.ones(2))[1] == "modest"
    assert op(torch.ones(1))[1] == "last"
    assert op(torch.ones(1), backend="modest")[1] == "modest"
    assert op(torch.ones(1), backend="shy")[1] == "shy"


@pytest.mark.parametrize("name", ["flash3", "flash2", "hub"])
def test_without_a_gpu_it_refuses(name):
    q, k, v, _ = make().to(torch.bfloat16)
    with pytest.raises(KernelError, match="it needs a GPU"):
        graft_attention(q, k, v, backend=name)


def test_nothing_is_downloaded_unless_asked_for(monkeypatch):
    """Even where the Hub's build could serve."""
    downloads = []

    class Build:
        flash_attn_func, flash_attn_varlen_func = staticmethod(dense), staticmethod(packed)

    def download(version):
        downloads.append(version)
        return Build

    monkeypatch.setattr(flash_attention, "_refuses", lambda *_: None)
    monkeypatch.setattr(flash_attention, "_download", download)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    call = make(w=64, dv=64).to(torch.bfloat16)
    hub = GRAFT_ATTENTION.backends["hub"]
    assert GRAFT_ATTENTION.choose(*call).name in ("native", "sdpa")
    assert GRAFT_ATTENTION.why_not(hub, *call) == "it must be asked for by name"
    assert not downloads
    assert_near(graft_attention(*call[:3], backend="hub"), loop(*call[:3]), 1e-2)
    assert downloads
