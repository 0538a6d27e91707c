"""Our Triton attention against the loop in float64: interpreted on the CPU, and compiled where there is a GPU.

Triton decides when a kernel is decorated whether to interpret it. The package's own kernels are decorated for a GPU, so the
tests load a second copy of both files while TRITON_INTERPRET is set. The interpreter works by replacing parts of Triton's
language and leaves some of them replaced; all is put back, for the tests after these.
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels import triton_attention, triton_attention_kernels
from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from surgery.kernels.flash_attention import BACKENDS as FLASH
from tests.kernels.inputs import assert_near
from tests.kernels.test_attention import loop, padding

triton = triton_attention.triton
pytestmark = pytest.mark.skipif(triton is None, reason="Triton is not installed")
# Interpreted, to simplify an example that fails would take minutes.
few = settings(deadline=None, max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


class Kernel(NamedTuple):
    module: Any
    device: str


@contextmanager
def interpretation() -> Iterator[None]:
    tl = triton.language
    parts = [tl, tl.core, tl.math, *(part for part in vars(tl.core).values() if inspect.isclass(part))]
    before = [dict(vars(part)) for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # torch imports Triton, so Triton's own functions (tl.max) are decorated for a GPU by now.
        for name, function in before[0].items():
            if isinstance(function, triton.JITFunction):
                setattr(tl, name, triton.jit(function.fn))
        yield
    for part, contents in zip(parts, before, strict=True):
        for name, now in list(vars(part).items()):
            if name not in contents:
                delattr(part, name)
            elif now is not contents[name]:
                setattr(part, name, contents[name])


@pytest.fixture(scope="module", params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def kernel(request):
    if request.param == "compiled":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield Kernel(triton_attention, "cuda")
        return
    with interpretation(), pytest.MonkeyPatch.context() as patch:
        for original in (triton_attention_kernels, triton_attention):
            spec = importlib.util.spec_from_file_location(original.__name__, original.__file__)
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, original.__name__, module)
            spec.loader.exec_module(module)
        assert module.INTERPRETED
        yield Kernel(module, "cpu")


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any  # a tensor or None

    def to(self, *what) -> "Call":
        return Call(*(x.to(*what) for x in self[:3]), self.mask if self.mask is None else self.mask.to(self.q.device))


def make(*, b=2, pairs=1, t=5, past=3, w=17, dv=4, missing=0.0, left=0, seed=0) -> Call:
    """float32. Of the keys that are not among the `left` first ones of the first sequence, some are missing too."""
    g = torch.Generator().manual_seed(seed)
    s = t + past
    q, k, v = (torch.randn(b, pairs, n, width, generator=g) for n, width in ((t, w), (s, w), (s, dv)))
    q = q * 2 / w**0.5  # attention that prefers some keys, but not one alone
    mask = torch.rand(b, s, generator=g) >= missing
    mask[0, :left] = False
    return Call(q, k, v, mask if missing or left else None)


calls = st.builds(
    make,
    b=st.integers(1, 2),
    pairs=st.integers(1, 2),
    t=st.sampled_from([1, 3, 5, 16, 17, 20]),  # decoding up to 4, and a block of queries is 16
    past=st.sampled_from([0, 1, 13, 30]),
    w=st.sampled_from([3, 16, 17, 40]),  # 40 = 32 + 16: two tiles
    dv=st.sampled_from([1, 5, 16, 20]),  # 20: two blocks of values
    missing=st.sampled_from([0.0, 0.3]),
    left=st.sampled_from([0, 2, 18]),
    seed=st.integers(0, 2**16),
)


def every_pair(call: Call) -> Any:
    """The mask of keys as one of queries and keys."""
    t, s = call.q.shape[2], call.k.shape[2]
    return None if call.mask is None else padding(len(call.q), t, s, [0]) & call.mask.cpu()[:, None, None]


def results(attend, call: Call) -> tuple[Tensor, ...]:
    """The output (b, pairs, t, dv) and the gradients of q, k and v, weighted at random."""
    q, k, v = (x.detach().requires_grad_() for x in call[:3])
    y = attend(q, k, v, call.mask)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    return y.detach(), *torch.autograd.grad((y * weight).sum(), (q, k, v))


def truth(call: Call) -> tuple[Tensor, ...]:
    pairs = every_pair(call)
    call = call.to("cpu")

    def attend(q, k, v, _):  # where no key exists at all, the loop's zeros depend on nothing
        return loop(q, k, v, pairs).transpose(1, 2) + 0 * (q.sum() + k.sum() + v.sum())

    return results(attend, Call(*(x.double() for x in call[:3]), None))


def check(kernel: Kernel, call: Call) -> tuple[Tensor, ...]:
    call = call.to(kernel.device)
    assert kernel.module.refuses(*call) is None
    got = results(kernel.module.attend, call)
    for actual, expected in zip(got, truth(call), strict=True):
        assert actual.dtype == call.q.dtype
        assert_near(actual.cpu(), expected, TOLERANCES[call.q.dtype], floor=1)
    return got


@few
@given(calls)
@example(make(w=40, dv=20, t=17, past=13))
@example(make(w=40, dv=20, t=17, past=13, missing=0.3, left=18))
@example(make(t=1, past=30, left=2))
@example(make(b=1, t=1, past=0, left=2))
def test_equals_a_loop(kernel, call):
    check(kernel, call)


@pytest.mark.parametrize(
    ("dtype", "missing", "t"),
    [(torch.bfloat16, 0.0, 1), (torch.bfloat16, 0.3, 17), (torch.float16, 0.3, 1), (torch.float16, 0.0, 17)],
)
def test_half_precision(kernel, dtype, missing, t):
    check(kernel, make(t=t, past=13, w=40, dv=20, missing=missing).to(dtype))


def test_a_graft_with_a_time_step(kernel):
    check(kernel, make(b=1, t=18, past=2, w=129, dv=24))


@pytest.mark.parametrize("t", [1, 6])
def test_a_query_that_sees_nothing_gives_nothing(kernel, t):
    call = make(t=t, past=20)  # decoding, two spans of keys
    mask = torch.ones(2, t + 20, dtype=torch.bool)
    mask[0] = False
    y, *gradients = check(kernel, call._replace(mask=mask))
    for x in (y, *gradients):
        assert not x[0].any()
        assert x[1].any()


@pytest.mark.parametrize("missing", [0.0, 0.4])
@pytest.mark.parametrize("t", [1, 17])
def test_what_does_not_exist_is_not_read(kernel, t, missing):
    """NaN in keys and values that are missing, and around the tensors in their buffers."""
    call = make(t=t, past=5, w=18, dv=5, missing=missing, left=3 if missing else 0).to(kernel.device)

    def buried(x: Tensor) -> Tensor:
        buffer = x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 1), torch.nan)
        buffer[:, :, :-3, :-1] = x
        return buffer[:, :, :-3, :-1]

    poisoned = Call(*(buried(x) for x in call[:3]), call.mask)
    if call.mask is not None:
        for x in poisoned[1:3]:
            x.masked_fill_(~call.mask[:, None, :, None], torch.nan)
    for clean, actual in zip(results(kernel.module.attend, call), results(kernel.module.attend, poisoned), strict=True):
        assert torch.equal(clean, actual)


@pytest.mark.parametrize("t", [2, 17])
def test_any_strides(kernel, t):
    """Tokens before heads, as projections leave them, and every other column."""
    call = make(pairs=2, t=t, past=2, w=40, dv=20, missing=0.2)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in call[:2])
    v = call.v.repeat_interleave(2, -1)[..., ::2]
    mask = call.mask.repeat_interleave(2, 1)[:, ::2]
    assert not any(x.is_contiguous() for x in (q, k, v, mask))
    check(kernel, Call(q, k, v, mask))


def test_the_same_bits_every_time(kernel):
    call = make(b=1, t=17, past=5, w=40, dv=20, missing=0.3).to(kernel.device)
    once, again = (results(kernel.module.attend, call) for _ in range(2))
    assert all(map(torch.equal, once, again))


def test_tiles():
    assert triton_attention.blocks(129, 64) == (128, 16, 64)
    assert triton_attention.blocks(144, 128) == (128, 16, 128)
    assert triton_attention.blocks(17, 4) == (32, 0, 16)
    assert triton_attention.blocks(257, 1536) == (256, 16, 256)
    for w in range(1, triton_attention.WIDEST + 1):
        w1, w2, _ = triton_attention.blocks(w, 64)
        assert w <= w1 + w2 < max(2 * w, 32)


def test_what_it_refuses(kernel):
    def reason(q, k, v, mask=None):
        return kernel.module.refuses(q, k, v, mask) or ""

    x = torch.zeros(1, 1, 3, 8, device=kernel.device)
    wide = torch.zeros(1, 1, 3, 300, device=kernel.device)
    assert not reason(x, x, x)
    assert "float32, bfloat16 or float16" in reason(x.double(), x.double(), x.double())
    assert "the same" in reason(x, x, x.half())
    assert "boolean, (batch, keys)" in reason(x, x, x, torch.ones(1, 1, 3, 3, dtype=torch.bool))
    assert "boolean, (batch, keys)" in reason(x, x, x, torch.ones(1, 3))
    assert "wider" in reason(wide, wide, x)
    assert "a key for every query" in reason(x, x[:, :, :2], x[:, :, :2])


@pytest.mark.skipif(triton_attention.INTERPRETED, reason="TRITON_INTERPRET is set")
def test_on_a_cpu_it_refuses():
    x = torch.zeros(1, 1, 3, 8)
    assert "needs a GPU" in triton_attention.refuses(x, x, x)
    assert GRAFT_ATTENTION.choose(x, x, x, None).name == "sdpa"


def test_tiles_are_chosen_by_measuring(kernel, monkeypatch):
    """As on a GPU, but for the stopwatch: which tiles are the fastest says a list."""
    if kernel.device != "cpu":
        pytest.skip("it is what test_on_a_gpu does")
    measured = []

    def stopwatch(launch, quantiles):
        launch()
        measured.append(len(measured) % 2)
        return [2.0, 2.0, 2.0] if measured[-1] == 0 else [1.0, 1.0, 1.0]

    monkeypatch.setattr(triton, "autotune", partial(triton.autotune, do_bench=stopwatch))
    monkeypatch.setattr(kernel.module, "_tiles", lambda *_: ((16, 16, 1, 1), (16, 32, 1, 1)))
    call = make(b=1, t=17, past=20, w=40, dv=20)
    check(kernel, call)
    assert len(measured) == 8  # the forward pass, dq, dk and dv
    check(kernel, call)
    assert len(measured) == 8


class NoGPU:
    """What Triton asks of a driver before it launches, on a GPU of a compute capability (90: 9.0)."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # Triton keeps what it compiles by device, and believes that a device stays what it is

    def get_current_stream(self, device):
        return 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.skipif(triton_attention.INTERPRETED, reason="TRITON_INTERPRET is set")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("capability", "dtype", "t"),
    [
        *((capability, torch.bfloat16, 1) for capability in (80, 90, 100)),
        (90, torch.bfloat16, 40),
        pytest.param(80, torch.bfloat16, 40, marks=pytest.mark.slow),
        pytest.param(100, torch.bfloat16, 40, marks=pytest.mark.slow),
        pytest.param(90, torch.float16, 40, marks=pytest.mark.slow),
        pytest.param(80, torch.float32, 40, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_a_gpu_that_is_not_there(monkeypatch, tmp_path, capability, dtype, t):
    """All but the launch: Triton takes what `attend` passes and compiles it to machine code of Ampere, Hopper and Blackwell.
    The last tiles of each kernel need no more shared memory than any GPU since compute capability 8.0 has for a block."""
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton does not compile for NVIDIA's GPUs")
    run, tiles, compiled = triton.JITFunction.run, triton_attention._tiles, {}

    def compile_only(kernel, *args, grid, warmup, **constants):
        assert all(n > 0 for n in grid(constants))
        compiled[kernel.fn.__name__] = run(kernel, *args, grid=grid, warmup=True, **constants)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", NoGPU(capability), raising=False)
    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    monkeypatch.setattr(triton_attention, "_processors", lambda _: 132)
    monkeypatch.setattr(triton_attention, "_tiles", lambda *which: tiles(*which)[-1:])
    call = make(t=t, past=60, w=129, dv=64, missing=0.1 if t == 1 else 0).to(dtype)
    if t == 1:
        triton_attention.attend(*call)
        assert list(compiled) == ["forward"]
    else:
        results(triton_attention.attend, call)
        assert list(compiled) == ["forward", "backward_queries", "backward_keys"]
    for kernel in compiled.values():
        assert kernel.metadata.target.arch == capability
        assert f"sm_{capability}" in kernel.asm["ptx"]
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= 99 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("backend", ["triton", *(flash.name for flash in FLASH if not flash.on_request)])
def test_on_a_gpu(dtype, backend):
    """Shapes of grafts, with the tiles that are chosen by measuring, through the dispatcher."""

    # FlashAttention's gradients of queries and keys are sums over pieces of the values, each rounded.
    tolerance = TOLERANCES[dtype] if backend == "triton" else 5e-2

    def through(name):
        return lambda q, k, v, mask: graft_attention(q, k, v, mask, backend=name).transpose(1, 2)

    served = 0
    for t, past, (w, pairs, dv), (missing, left) in product(
        (1, 77, 1000),
        (0, 3000),
        ((129, 3, 64), (129, 2, 128), (144, 1, 1536), (17, 16, 4), (64, 2, 64), (257, 1, 64)),
        ((0, 0), (0, 40), (0.3, 0)),
    ):
        call = make(t=t, past=past, w=w, pairs=pairs, dv=dv, missing=missing, left=left).to(dtype).to("cuda")
        reason = GRAFT_ATTENTION.why_not(GRAFT_ATTENTION.backends[backend], *call, by_name=True)
        if reason:
            continue
        served += 1
        exact = results(through("reference"), Call(*(x.double() for x in call[:3]), call.mask))
        for actual, expected in zip(results(through(backend), call), exact, strict=True):
            assert_near(actual, expected, tolerance, floor=1)
    if not served:
        pytest.skip(f"{backend}: {reason}")
