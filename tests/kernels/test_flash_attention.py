"""How calls are presented to FlashAttention, and which of its versions serves where, with stand-ins that demand what the real
ones do (flash_stand_ins.py).

The real ones are tested in test_triton_attention.py, on a GPU.
"""

import sys
from itertools import product
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.kernels import flash_attention
from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from surgery.kernels.dispatch import Backend, KernelError, Operation
from surgery.kernels.flash_attention import Cut, Kind, attend, cut, takes
from tests.kernels.flash_stand_ins import Package, RefusedError, installed  # noqa: F401
from tests.kernels.inputs import assert_near
from tests.kernels.test_attention import loop, padding
from tests.kernels.test_triton_attention import Call, make, results

few = settings(deadline=None, max_examples=25)


KINDS = [
    Kind(2, 8), Kind(2, 8, trained=True), Kind(3, 9), Kind(3, 9, trained=True),
    *(Kind(4, major, trained) for major in (9, 10) for trained in (False, True)),
]  # fmt: skip


def through_flash(kind):
    package = Package(kind.version, (kind.major, 0)).module()

    def run(q, k, v, mask):
        presented = cut(q.shape[-1], v.shape[-1], kind)
        return attend(package.flash_attn_func, package.flash_attn_varlen_func, q, k, v, mask, presented)

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
@given(calls, st.sampled_from(KINDS))
def test_equals_a_loop(call, kind):
    if call.mask is not None:
        call.mask[:, -1] = True  # at least one token: packing nothing at all is not demanded of the kernels
    call = call.to(torch.bfloat16)
    mask = None if call.mask is None else padding(len(call.q), call.q.shape[2], call.k.shape[2], [0]) & call.mask[:, None, None]
    exact = Call(*(x.double() for x in call[:3]), None)
    expected = results(lambda q, k, v, _: loop(q, k, v, mask).transpose(1, 2), exact)
    # The gradients of q and k are sums over the pieces, each rounded to bfloat16.
    tolerances = (1e-2, 5e-2, 5e-2, 1e-2)
    forward_only = kind.version == 3 and not kind.trained  # its widths differ in a forward pass alone
    actual = (through_flash(kind)(*call),) if forward_only else results(through_flash(kind), call)
    for one, truth, tolerance in zip(actual, expected, tolerances, strict=False):
        assert_near(one, truth, tolerance, floor=1)


def test_strides_that_it_would_read_wrongly():
    call = make(w=17, dv=9).to(torch.bfloat16)
    odd = call._replace(q=call.q[..., 1:], k=call.k[..., 1:], v=call.v[..., 1:])
    for kind in KINDS:
        assert_near(through_flash(kind)(*odd), loop(*odd[:3]).transpose(1, 2), 1e-2)


def test_queries_and_keys_are_not_copied_for_pieces():
    seen, module = [], Package(2, (8, 0)).module()

    def watch(q, k, v, **options):
        seen.extend((q, k))
        return module.flash_attn_func(q, k, v, **options)

    q, k, v, _ = make(w=128, dv=384).to(torch.bfloat16)
    attend(watch, module.flash_attn_varlen_func, q, k, v, None, cut(128, 384))
    assert [x.shape[2] for x in seen] == [3, 3]
    assert [x.data_ptr() for x in seen] == [q.data_ptr(), k.data_ptr()]


def test_cuts():
    assert cut(128, 128) == Cut(128, 128, 1)
    assert cut(129, 128) == Cut(136, 136, 1)
    assert cut(129, 128, Kind(3)) == Cut(136, 128, 1)
    assert cut(129, 128, Kind(3, trained=True)) == Cut(136, 136, 1)
    assert cut(64, 400, Kind(3)) == Cut(64, 400, 1)
    assert cut(129, 64, Kind(4, 9, trained=True)) == Cut(136, 64, 1)
    assert cut(129, 64, Kind(4, 10)) == Cut(192, 128, 1)
    assert cut(129, 1536).work(2) == 6 * 2 * 256


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_width_has_a_cut(kind):
    for w, dv in product((8, 17, 129, 192, 200, 256), (4, 64, 300, 1536)):
        query, value, pieces = cut(w, dv, kind)
        assert query >= w
        assert pieces * value >= dv
        assert query % 8 == value % 8 == 0
        assert takes(kind, query, value)


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
    assert not declined(4, 129, 64)
    assert declined(4, 129, 64, t=1)
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


def test_what_the_stand_ins_refuse():
    """They are no use if they take anything."""
    q = torch.zeros(1, 3, 1, 136, dtype=torch.bfloat16)
    right = {"softmax_scale": 1.0, "causal": True, "deterministic": False}
    second, third, ours = (Package(n, (9, 0)).module().flash_attn_func for n in (2, 3, 4))
    for package in (second, third, ours):
        package(q, q, q, **right)
        for wrong in (
            {"softmax_scale": None}, {"causal": False}, {"window_size": (3, 0)}, {"softcap": 30.0}, {"deterministic": None}
        ):  # fmt: skip
            with pytest.raises(RefusedError):
                package(q, q, q, **right | wrong)
        for tensor in (q.float(), q[..., :132], q.transpose(1, 3), torch.zeros(1, 3, 1, 264, dtype=torch.bfloat16)):
            with pytest.raises(RefusedError):
                package(tensor, tensor, tensor, **right)
        with pytest.raises(TypeError):
            package(q, q, q, **right, scale=1.0)
    narrow = q[..., :64]
    assert ours(q, q, narrow, **right)[0].shape == (1, 3, 1, 64)
    for package in (second, third, Package(4, (10, 0)).module().flash_attn_func):
        with pytest.raises(RefusedError):
            package(q, q, narrow, **right)
    with pytest.raises(RefusedError, match="Hopper"):
        Package(3, (10, 0)).module().flash_attn_func(q, q, q, **right)
    positional = Package(4, (9, 0)).module().flash_attn_varlen_func
    begins = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(RefusedError):  # where the other versions have the beginnings, this one has other things
        positional(q[0], q[0], q[0], begins, begins, 3, 3, **right)


SHAPES = {"129/64": (129, 64), "129/128": (129, 128), "64/64": (64, 64), "17/4": (17, 4)}
# Where all versions are installed: (compute capability, a backward pass follows) -> who serves each of the shapes. "other" is
# whoever comes after FlashAttention: on a GPU, our kernel.
SERVING = {
    ((8, 0), False): ("other", "other", "flash2", "other"),
    ((8, 6), True): ("other", "other", "flash2", "other"),
    ((9, 0), False): ("flash4", "flash3", "flash3", "flash4"),
    ((9, 0), True): ("flash4", "flash3", "flash3", "flash4"),
    ((10, 0), False): ("other", "flash4", "flash4", "flash4"),
    ((10, 0), True): ("other", "flash4", "flash4", "flash4"),
    ((12, 0), True): ("other", "other", "flash2", "other"),
    ((7, 5), False): ("other", "other", "other", "other"),
}


def server(*call):
    name = GRAFT_ATTENTION.choose(*call).name
    return name if name.startswith("flash") else "other"


@pytest.mark.parametrize(("capability", "trained"), SERVING, ids=str)
def test_who_serves(installed, capability, trained):  # noqa: F811
    """By compute capability; the stand-ins check each argument, and the result and the gradients are those of the loop."""
    packages = installed(capability, 2, 3, 4)
    for (w, dv), name in zip(SHAPES.values(), SERVING[capability, trained], strict=True):
        call = make(b=2, t=70, past=3, w=w, dv=dv).to(torch.bfloat16)
        if not trained:
            assert server(*call) == name, (w, dv)
            assert_near(graft_attention(*call[:3]).transpose(1, 2), loop(*call[:3]).transpose(1, 2), 1e-2, floor=1)
            continue
        learning = [x.detach().requires_grad_() for x in call[:3]]
        assert server(*learning, None) == name, (w, dv)
        exact = Call(*(x.double() for x in call[:3]), None)
        expected = results(lambda q, k, v, _: loop(q, k, v).transpose(1, 2), exact)
        actual = results(lambda q, k, v, _: graft_attention(q, k, v).transpose(1, 2), call)
        for one, truth, tolerance in zip(actual, expected, (1e-2, 5e-2, 5e-2, 1e-2), strict=True):
            assert_near(one, truth, tolerance, floor=1)
    served = {f"flash{version}" for version, package in packages.items() if package.calls}
    assert served == set(SERVING[capability, trained]) - {"other"}


@pytest.mark.parametrize("version", [2, 3, 4])
def test_padding_on_the_left_is_packed(installed, version):  # noqa: F811
    installed((9, 0), version)
    call = make(b=2, t=70, past=3, w=64, dv=64, left=5).to(torch.bfloat16)
    assert GRAFT_ATTENTION.choose(*call).name == f"flash{version}"
    mask = padding(2, 70, 73, [0]) & call.mask[:, None, None]
    assert_near(graft_attention(*call), loop(*call[:3], mask), 1e-2, floor=1)


def test_deterministic_where_torch_is_to_be(installed, monkeypatch):  # noqa: F811
    (package,) = installed((9, 0), 4).values()
    call = make(t=70, w=64, dv=64).to(torch.bfloat16)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    graft_attention(*call[:3], backend="flash4")
    assert package.calls[-1] == (64, 64, True)


def test_one_that_is_broken_does_not_serve(installed, monkeypatch):  # noqa: F811
    """It imports, and fails at the first call, or gives something else: the next one serves."""
    installed((9, 0), 3, 4)
    broken = ModuleType("flash_attn_interface")
    broken.flash_attn_func = broken.flash_attn_varlen_func = lambda *_, **__: 1 / 0
    monkeypatch.setitem(sys.modules, "flash_attn_interface", broken)
    call = make(t=70, w=64, dv=64).to(torch.bfloat16)
    assert GRAFT_ATTENTION.choose(*call).name == "flash4"
    assert "ZeroDivisionError" in GRAFT_ATTENTION.why_not(GRAFT_ATTENTION.backends["flash3"], *call)


@pytest.mark.parametrize("name", ["flash3", "flash4", "flash2", "hub"])
def test_without_a_gpu_it_refuses(name):
    q, k, v, _ = make().to(torch.bfloat16)
    with pytest.raises(KernelError, match="it needs a GPU"):
        graft_attention(q, k, v, backend=name)


def test_nothing_is_downloaded_unless_asked_for(monkeypatch):
    """Even where the Hub's build could serve."""
    downloads = []

    def download(version):
        downloads.append(version)
        return Package(version, (9, 0)).module()

    monkeypatch.setattr(flash_attention, "_refuses", lambda *_: None)
    monkeypatch.setattr(flash_attention, "_download", download)
    monkeypatch.setattr(flash_attention, "capability", lambda _: (9, 0))
    call = make(w=64, dv=64).to(torch.bfloat16)
    hub = GRAFT_ATTENTION.backends["hub"]
    assert server(*call) == "other"
    assert GRAFT_ATTENTION.why_not(hub, *call) == "it must be asked for by name"
    assert not downloads
    assert_near(graft_attention(*call[:3], backend="hub"), loop(*call[:3]), 1e-2)
    assert downloads
