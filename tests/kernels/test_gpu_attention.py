"""The attention of GPUs without one: how calls are presented to FlashAttention, by stand-ins that demand what the real packages
do (flash_stand_ins.py); flex_attention as it runs on a CPU; and which of them serves where. On a GPU, the real ones."""

import sys
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels import flash_attention, flex_attention, probing
from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from surgery.kernels.dispatch import KernelError
from surgery.kernels.flash_attention import Cut, Kind, attend, cut, takes
from tests.kernels.flash_stand_ins import Package, RefusedError, installed  # noqa: F401
from tests.kernels.inputs import assert_near
from tests.kernels.test_attention import loop, padding
from tests.models import but_slow

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
KINDS = [
    Kind(2, 8), Kind(2, 8, trained=True), Kind(3, 9), Kind(3, 9, trained=True),
    *(Kind(4, major, trained) for major in (9, 10) for trained in (False, True)),
]  # fmt: skip
# Of the output and of the gradients of q, k and v. Those of q and k are sums over pieces of the values, each rounded.
ROUNDED = (1e-2, 5e-2, 5e-2, 1e-2)


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any = None  # a tensor

    def to(self, what) -> "Call":
        """In another dtype or, with its mask, on another device."""
        mask = self.mask if self.mask is None or isinstance(what, torch.dtype) else self.mask.to(what)
        return Call(*(m.to(what) for m in self[:3]), mask)

    def pairs(self) -> Tensor | None:
        """The mask of keys as one of queries and keys."""
        t, s = self.q.shape[2], self.k.shape[2]
        return None if self.mask is None else padding(len(self.q), t, s, [0]) & self.mask.cpu()[:, None, None]


def make(*, b=2, pairs=1, t=5, past=3, w=17, dv=4, missing=0.0, left=0, seed=0) -> Call:
    """float32. Of the keys that are not among the `left` first ones of the first sequence, some are missing too."""
    g = torch.Generator().manual_seed(seed)
    s = t + past
    q, k, v = (torch.randn(b, pairs, n, width, generator=g) for n, width in ((t, w), (s, w), (s, dv)))
    mask = torch.rand(b, s, generator=g) >= missing
    mask[0, :left] = False
    return Call(q * 2 / w**0.5, k, v, mask if missing or left else None)  # it prefers some keys, but not one alone


def results(attend, call: Call) -> tuple[Tensor, ...]:
    """The output (b, pairs, t, dv) and the gradients of q, k and v, weighted at random."""
    q, k, v = (m.detach().requires_grad_() for m in call[:3])
    y = attend(q, k, v, call.mask)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    return y.detach(), *torch.autograd.grad((y * weight).sum(), (q, k, v))


def truth(call: Call) -> tuple[Tensor, ...]:
    pairs = call.pairs()
    exact = Call(*(m.cpu().double() for m in call[:3]))
    return results(lambda q, k, v, _: loop(q, k, v, pairs).transpose(1, 2) + 0 * (q.sum() + k.sum() + v.sum()), exact)


def through(backend: str | None = None):
    return lambda q, k, v, mask: graft_attention(q, k, v, mask, backend=backend).transpose(1, 2)


def assert_all_near(actual, call: Call, tolerances=ROUNDED):
    for one, exact, tolerance in zip(actual, truth(call), tolerances, strict=False):
        assert_near(one.cpu(), exact, tolerance, floor=1)


def through_flash(kind: Kind):
    package = Package(kind.version, (kind.major, 0)).module()

    def run(q, k, v, mask):
        presented = cut(q.shape[-1], v.shape[-1], kind)
        return attend(package.flash_attn_func, package.flash_attn_varlen_func, q, k, v, mask, presented)

    return run


calls = st.builds(
    make, b=st.integers(1, 3), pairs=st.integers(1, 3), t=st.integers(1, 9), past=st.integers(0, 5),
    w=st.sampled_from([3, 8, 17, 129, 144, 250]), dv=st.sampled_from([1, 4, 16, 64, 100, 300, 700]),
    left=st.sampled_from([0, 3]), seed=st.integers(0, 2**16),
)  # fmt: skip


@settings(max_examples=15)
@given(calls, st.sampled_from(KINDS))
def test_flash_equals_a_loop(call, kind):
    if call.mask is not None:
        call.mask[:, -1] = True  # at least one token: packing nothing at all is not demanded of the kernels
    call = call.to(torch.bfloat16)
    forward_only = kind.version == 3 and not kind.trained  # its widths differ in a forward pass alone
    run = through_flash(kind)
    assert_all_near((run(*call),) if forward_only else results(run, call), call)


def test_strides_that_flash_would_read_wrongly():
    call = make(w=17, dv=9).to(torch.bfloat16)
    odd = Call(*(m[..., 1:] for m in call[:3]))
    for kind in KINDS:
        assert_all_near((through_flash(kind)(*odd),), odd)


def test_queries_and_keys_are_not_copied_for_pieces():
    seen, module = [], Package(2, (8, 0)).module()

    def watch(q, k, v, **options):
        seen.extend((q, k))
        return module.flash_attn_func(q, k, v, **options)

    q, k, v, _ = make(w=128, dv=384).to(torch.bfloat16)
    attend(watch, module.flash_attn_varlen_func, q, k, v, None, cut(128, 384))
    assert [m.shape[2] for m in seen] == [3, 3]
    assert [m.data_ptr() for m in seen] == [q.data_ptr(), k.data_ptr()]


def test_cuts():
    assert cut(128, 128) == Cut(128, 128, 1)
    assert cut(129, 128) == Cut(136, 136, 1)
    assert cut(129, 128, Kind(3)) == Cut(136, 128, 1)
    assert cut(129, 128, Kind(3, trained=True)) == Cut(136, 136, 1)
    assert cut(64, 400, Kind(3)) == Cut(64, 400, 1)
    assert cut(129, 64, Kind(4, 9, trained=True)) == Cut(136, 64, 1)
    assert cut(129, 64, Kind(4, 10)) == Cut(192, 128, 1)
    assert cut(129, 1536).work(2) == 6 * 2 * 256
    for kind, w, dv in product(KINDS, (8, 17, 129, 192, 200, 256), (4, 64, 300, 1536)):
        query, value, pieces = cut(w, dv, kind)
        assert query >= w
        assert pieces * value >= dv
        assert query % 8 == value % 8 == 0
        assert takes(kind, query, value)


def test_what_the_stand_ins_refuse():
    """They are no use if they take anything."""
    q = torch.zeros(1, 3, 1, 136, dtype=torch.bfloat16)
    right = {"softmax_scale": 1.0, "causal": True, "deterministic": False}
    second, third, fourth = (Package(n, (9, 0)).module().flash_attn_func for n in (2, 3, 4))
    for package in (second, third, fourth):
        package(q, q, q, **right)
        for wrong in (
            {"softmax_scale": None}, {"causal": False}, {"window_size": (3, 0)}, {"softcap": 30.0}, {"deterministic": None}
        ):  # fmt: skip
            with pytest.raises(RefusedError):
                package(q, q, q, **right | wrong)
        for tensor in (q.float(), q[..., :132], q.transpose(1, 3), torch.zeros(1, 3, 1, 264, dtype=torch.bfloat16)):
            with pytest.raises(RefusedError):
                package(tensor, tensor, tensor, **right)
    narrow = q[..., :64]
    assert fourth(q, q, narrow, **right)[0].shape == (1, 3, 1, 64)
    for package in (second, third, Package(4, (10, 0)).module().flash_attn_func):
        with pytest.raises(RefusedError):
            package(q, q, narrow, **right)
    with pytest.raises(RefusedError, match="Hopper"):
        Package(3, (10, 0)).module().flash_attn_func(q, q, q, **right)
    positional = Package(4, (9, 0)).module().flash_attn_varlen_func
    begins = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(RefusedError):  # where the other versions have the beginnings, this one has other things
        positional(q[0], q[0], q[0], begins, begins, 3, 3, **right)


SHAPES = ((129, 64), (129, 128), (64, 64), (17, 4), (129, 1536))
# Where all versions are installed: (compute capability, a backward pass follows) -> who serves each of the shapes. "other" is
# whoever comes after FlashAttention: flex_attention, on a GPU.
SERVING = {
    ((8, 0), False): ("other", "flash2", "flash2", "other", "flash2"),
    ((8, 6), True): ("other", "flash2", "flash2", "other", "flash2"),
    ((9, 0), False): ("flash3", "flash3", "flash3", "flash4", "flash3"),
    ((9, 0), True): ("flash3", "flash3", "flash3", "flash4", "flash3"),
    ((10, 0), False): ("flash4", "flash4", "flash4", "flash4", "flash4"),
    ((10, 0), True): ("flash4", "flash4", "flash4", "flash4", "flash4"),
    ((12, 0), True): ("other", "flash2", "flash2", "other", "flash2"),
    ((7, 5), False): ("other", "other", "other", "other", "other"),
}


def server(*call):
    name = GRAFT_ATTENTION.choose(*call).name
    return name if name.startswith("flash") else "other"


@pytest.mark.parametrize(("capability", "trained"), SERVING, ids=str)
def test_which_flash_serves(installed, capability, trained):  # noqa: F811
    """By compute capability; the stand-ins check each argument, and the result and the gradients are those of the loop."""
    packages = installed(capability, 2, 3, 4)
    for (w, dv), name in zip(SHAPES, SERVING[capability, trained], strict=True):
        call = make(b=1, t=70, past=3, w=w, dv=dv).to(torch.bfloat16)
        assert server(*(m.detach().requires_grad_(trained) for m in call[:3]), None) == name, (w, dv)
        if dv < 1000:  # a loop of a minute
            assert_all_near(results(through(), call) if trained else (through()(*call),), call)
    served = {f"flash{version}" for version, package in packages.items() if package.calls}
    assert served == set(SERVING[capability, trained]) - {"other"}
    one_query = make(t=1, w=129, dv=64).to(torch.bfloat16)
    assert server(*one_query) == "other"  # padding its keys would take longer


@pytest.mark.parametrize("version", [2, 3, 4])
def test_padding_on_the_left_is_packed(installed, version):  # noqa: F811
    installed((9, 0), version)
    call = make(b=2, t=70, past=3, w=64, dv=64, left=5).to(torch.bfloat16)
    assert server(*call) == f"flash{version}"
    assert_all_near((through()(*call),), call)


def test_deterministic_where_torch_is_to_be(installed, monkeypatch):  # noqa: F811
    (package,) = installed((9, 0), 4).values()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    through("flash4")(*make(t=70, w=64, dv=64).to(torch.bfloat16))
    assert package.calls[-1] == (64, 64, True)


def test_one_that_is_broken_does_not_serve(installed, monkeypatch):  # noqa: F811
    """It imports, and fails at the first call, or gives something else: the next one serves."""
    installed((9, 0), 3, 4)
    broken = ModuleType("flash_attn_interface")
    broken.flash_attn_func = broken.flash_attn_varlen_func = lambda *_, **__: 1 / 0
    monkeypatch.setitem(sys.modules, "flash_attn_interface", broken)
    call = make(t=70, w=64, dv=64).to(torch.bfloat16)
    assert server(*call) == "flash4"
    assert "ZeroDivisionError" in GRAFT_ATTENTION.why_not(GRAFT_ATTENTION.backends["flash3"], *call)


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
    assert server(*call) == "other"
    assert GRAFT_ATTENTION.why_not(GRAFT_ATTENTION.backends["hub"], *call) == "it must be asked for by name"
    assert not downloads
    assert_all_near((through("hub")(*call),), call)
    assert downloads


def test_without_a_gpu_they_refuse():
    call = make(t=20).to(torch.bfloat16)
    for name in ("flash3", "flash4", "flash2", "hub"):
        with pytest.raises(KernelError, match="it needs a GPU"):
            through(name)(*call)
    assert GRAFT_ATTENTION.choose(*call).name == "native"
    with pytest.raises(KernelError, match="no backward pass"):
        through("flex")(call.q.requires_grad_(), *call[1:])
    with pytest.raises(KernelError, match="boolean masks"):
        through("flex")(*make(t=3, past=0)[:3], torch.zeros(2, 1, 3, 3))
    with pytest.raises(KernelError, match="has no backend named 'triton'; it has flash3, flash4, flash2, hub, flex, "):
        through("triton")(*call)  # one of our own, until 0.19


FLEX = [
    *((torch.float32, mask, {"t": t, "w": 129, "dv": 64}) for t in (1, 20) for mask in ("none", "keys", "pairs")),
    *((dtype, "keys", {"t": 140, "w": 17, "dv": 200}) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("dtype", "mask", "shape"), but_slow(FLEX, FLEX[0], *FLEX[4:7]), ids=str)
def test_flex_equals_a_loop(dtype, mask, shape):
    """Queries at the end of the keys; keys that are missing, and rows that see nothing; several blocks."""
    call = make(past=7, pairs=2, missing=0.3, left=12, **shape).to(dtype)
    call = call._replace(mask=None) if mask == "none" else call
    given = call.pairs() if mask == "pairs" else call.mask
    assert_all_near((through("flex")(*call[:3], given),), call, [1e-5 if dtype == torch.float32 else 1e-2])


def test_where_flex_serves_on_a_gpu(monkeypatch):
    """What torch's kernels would store the scores of, and what none of the others takes."""
    monkeypatch.setattr(flex_attention, "on_gpu", lambda _: True)
    monkeypatch.setattr(flex_attention, "_compiled", flex_attention._flex)
    monkeypatch.setattr(probing, "_outcomes", {})

    def serves(dtype=torch.bfloat16, mask=None, **shape):
        call = make(**{"t": 20, "w": 40, "dv": 16, **shape}).to(dtype)
        return GRAFT_ATTENTION.choose(*call[:3], mask).name == "flex"

    assert serves()
    assert serves(mask=padding(2, 20, 23, [0, 4]))
    assert not serves(w=16, past=0)
    assert serves(w=16, past=0, mask=padding(2, 20, 20, [0, 4]))
    assert not serves(t=1)
    assert not serves(w=300)
    assert not serves(dv=300)
    assert not serves(torch.float32)
    assert not serves(mask=torch.zeros(2, 1, 20, 23, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["flash3", "flash4", "flash2", "flex", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(dtype, backend):
    """Shapes of grafts, by the real kernels, through the dispatcher."""
    served = 0
    for t, past, (w, pairs, dv), (missing, left) in product(
        (1, 77, 1000),
        (0, 3000),
        ((129, 3, 64), (129, 2, 128), (144, 1, 1536), (17, 16, 4), (64, 2, 64), (257, 1, 64)),
        ((0, 0), (0, 40), (0.3, 0)),
    ):
        call = make(t=t, past=past, w=w, pairs=pairs, dv=dv, missing=missing, left=left).to(dtype).to("cuda")
        if reason := GRAFT_ATTENTION.why_not(GRAFT_ATTENTION.backends[backend], *call, by_name=True):
            continue
        served += 1
        exact = results(through("reference"), Call(*(m.double() for m in call[:3]), call.mask))
        for actual, expected in zip(results(through(backend), call), exact, strict=True):
            assert_near(actual, expected, 1e-3 if dtype == torch.float32 else 5e-2, floor=1)
    if not served:
        pytest.skip(f"{backend}: {reason}")
