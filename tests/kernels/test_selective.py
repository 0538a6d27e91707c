"""Every backend of Mamba-1's scan and of its step against the recurrence in float64."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.kernels import selective_chunked
from surgery.kernels.dispatch import KernelError
from surgery.kernels.selective import SELECTIVE_SCAN, SELECTIVE_STEP, selective_scan, selective_step
from tests.kernels.inputs import Scan, assert_near

few = settings(deadline=None, max_examples=40)
CHUNK = 128  # selective.c
SEGMENT = selective_chunked.SEGMENT
BORDERS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 3]


@pytest.fixture(scope="session", params=["native", "chunked"])
def ours(request) -> str:
    if reason := SELECTIVE_SCAN.why_not(SELECTIVE_SCAN.backends[request.param], *make_scan(1)):
        pytest.skip(f"{request.param} cannot serve here: {reason}")
    return request.param


def make_scan(length: int, *, batch=2, channels=7, size=5, forgetting=1.0, skip=True, state=True, mixer=True, seed=0) -> Scan:
    """float32. Most time steps are small; the others, with probability 0.2, are up to `forgetting`. mixer: laid out as the
    model's mixer has them, in parts of larger tensors whose other parts are NaN."""
    g = torch.Generator().manual_seed(seed)
    dt = 0.001 + 0.1 * torch.rand(batch, length, channels, generator=g)
    dt = torch.where(torch.rand(dt.shape, generator=g) < 0.2, forgetting * torch.rand(dt.shape, generator=g), dt)
    x, B, C = (torch.randn(batch, length, width, generator=g) for width in (channels, size, size))
    if mixer:
        x, dt = (inside(m.transpose(1, 2), (0, 0, 3)).transpose(1, 2) for m in (x, dt))
        B, C = inside(torch.cat([B, C], -1), (0, 0, 2)).split(size, -1)
    return Scan(
        x, dt, -0.5 - 15 * torch.rand(channels, size, generator=g), B, C,
        torch.randn(channels, generator=g) if skip else None,
        torch.randn(batch, channels, size, generator=g) if state else None,
    )  # fmt: skip


def inside(m: Tensor, margin: tuple[int, ...]) -> Tensor:
    """Equal to m; a part of a tensor that is larger by `margin` at the end, where it is NaN."""
    around = torch.full([size + more for size, more in zip(m.shape, margin, strict=True)], torch.nan, dtype=m.dtype)
    part = around[tuple(slice(size) for size in m.shape)]
    return part.copy_(m)


lengths = st.sampled_from(BORDERS) | st.integers(1, 2 * CHUNK)


def scans(lengths=lengths, forgetting=(0.1, 1.0, 30.0)):
    return st.builds(
        make_scan, lengths, batch=st.integers(1, 3), channels=st.sampled_from([1, 3, 16, 33, 130]),
        size=st.sampled_from([1, 2, 5, 16, 33]), forgetting=st.sampled_from(forgetting), skip=st.booleans(),
        state=st.booleans(), mixer=st.booleans(), seed=st.integers(0, 2**16),
    )  # fmt: skip


def truth(scan: Scan) -> tuple[Tensor, Tensor]:
    return selective_scan(*scan.double(), backend="reference")


def gradients(scan: Scan, backend: str | None, outputs=(True, True)) -> list[Tensor]:
    """Of a random linear function of the outputs and the final state, by every input that is there."""
    scan = scan.map(lambda m: m.detach().requires_grad_())
    results = selective_scan(*scan, backend=backend)
    g = torch.Generator().manual_seed(0)
    losses = [(m * torch.randn(m.shape, generator=g).to(m.dtype)).sum() for m in results]
    losses = [loss for loss, wanted in zip(losses, outputs, strict=True) if wanted]
    return list(torch.autograd.grad(losses, [m for m in scan if m is not None], materialize_grads=True))


def assert_all_near(actual, exact, tolerance=1e-5, floor=1.0):
    """floor: all channels share the products of C and B, whose sum over n may cancel."""
    for a, e in zip(actual, exact, strict=True):
        assert_near(a, e, tolerance, floor)


def assert_right(results, scan):
    """As the recurrence in float64. Where what is summed cancels to less than a hundredth of it, its rounding remains."""
    summed = truth(Scan._make(m if m is None or m is scan.A else m.abs() for m in scan))
    for actual, exact, size in zip(results, truth(scan), summed, strict=True):
        assert_near(actual, exact, floor=max(1.0, size.norm().item() / 100))


@few
@given(scan=scans())
def test_the_scan_equals_the_recurrence(ours, scan):
    y, state = selective_scan(*scan, backend=ours)
    assert y.dtype == state.dtype == torch.float32
    assert_right((y, state), scan)


@few
@given(scan=scans())
def test_the_scan_in_bfloat16(ours, scan):
    scan = scan.bfloat16()
    y, state = selective_scan(*scan, backend=ours)
    exact, exact_state = truth(scan)
    assert y.dtype == torch.bfloat16
    assert_near(y, exact, 1e-2, floor=1)
    assert state.dtype == torch.float32  # only the outputs are rounded
    assert_near(state, exact_state, floor=1)


@settings(few, max_examples=25)
@given(scan=scans(), outputs=st.sampled_from([(True, True), (True, False), (False, True)]))
def test_gradients(ours, scan, outputs):
    exact = gradients(scan.double(), "reference", outputs)
    assert_all_near(gradients(scan, ours, outputs), exact)


def test_gradients_in_bfloat16(ours):
    scan = make_scan(CHUNK + 5).bfloat16()
    actual = gradients(scan, ours)
    assert [m.dtype for m in actual] == [m.dtype for m in scan]
    assert_all_near(actual, gradients(scan.double(), "reference"), 1e-2)


def test_gradients_of_what_is_trained_alone(ours):
    scan = make_scan(CHUNK + 5)
    exact = gradients(scan, ours)
    for i, name in enumerate(Scan._fields):
        leaf = getattr(scan, name).detach().requires_grad_()
        y, state = selective_scan(*scan._replace(**{name: leaf}), backend=ours)
        g = torch.Generator().manual_seed(0)
        sum((m * torch.randn(m.shape, generator=g)).sum() for m in (y, state)).backward()
        torch.testing.assert_close(leaf.grad, exact[i], rtol=0, atol=0)


def test_chunked_passes_gradcheck(monkeypatch):
    monkeypatch.setattr(selective_chunked, "SEGMENT", 9)
    monkeypatch.setattr(selective_chunked, "CPU_BLOCK", 9 * 2 * 2)
    scan = make_scan(23, channels=2, size=2, mixer=False).double().map(Tensor.requires_grad_)
    assert torch.autograd.gradcheck(lambda *args: selective_scan(*args, backend="chunked"), tuple(scan), fast_mode=True)


@pytest.mark.parametrize("length", BORDERS)
@pytest.mark.parametrize("backend", ["native", "chunked", "stock", "reference"])
def test_borders(length, backend):
    """Whatever hypothesis happens to draw, every backend sees these lengths."""
    scan = make_scan(length, state=backend != "stock")
    if reason := SELECTIVE_SCAN.why_not(SELECTIVE_SCAN.backends[backend], *scan):
        pytest.skip(reason)
    assert_all_near(selective_scan(*scan, backend=backend), truth(scan))


def test_long(ours):
    scan = make_scan(3001, batch=1, channels=4, size=2, forgetting=0.1)
    assert_all_near(selective_scan(*scan, backend=ours), truth(scan))


def test_a_constant_time_step_adds_up_no_error(ours):
    """Rounded the same way at every token, a decay close to 1 is wrong in the same direction each time."""
    scan = make_scan(2000, batch=1, channels=4, size=2, state=False)
    scan = scan._replace(dt=torch.full_like(scan.dt, 0.01), x=torch.ones_like(scan.x), B=torch.ones_like(scan.B))
    assert_all_near(selective_scan(*scan, backend=ours), truth(scan))


@few
@given(scan=scans(st.integers(2, 2 * CHUNK)), data=st.data())
def test_a_sequence_in_two_parts(ours, scan, data):
    cut = data.draw(st.integers(1, scan.x.shape[1] - 1))
    first, second = (
        Scan(*(m[:, part] if i in (0, 1, 3, 4) else m for i, m in enumerate(scan))) for part in (slice(cut), slice(cut, None))
    )
    y, state = selective_scan(*first, backend=ours)
    z, state = selective_scan(*second._replace(initial_state=state), backend=ours)
    assert_all_near((torch.cat([y, z], 1), state), selective_scan(*scan, backend=ours))


@pytest.mark.parametrize("backend", [name for name in SELECTIVE_STEP.backends if name != "mamba_ssm"])
@few
@given(scan=scans(st.integers(1, 12)))
def test_steps_equal_the_scan(backend, scan):
    x, dt, A, B, C, D, initial_state = scan
    state = torch.zeros(x.shape[0], *A.shape) if initial_state is None else initial_state.clone()
    y = [selective_step(state, x[:, i], dt[:, i], A, B[:, i], C[:, i], D, backend=backend) for i in range(x.shape[1])]
    assert_right((torch.stack(y, 1), state), scan)  # the state, in place


@pytest.mark.parametrize("backend", [name for name in SELECTIVE_STEP.backends if name != "mamba_ssm"])
def test_a_step_in_bfloat16_keeps_the_state_in_float32(backend):
    x, dt, A, B, C, D, state = scan = make_scan(1).bfloat16()
    exact, exact_state = truth(scan)
    y = selective_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, backend=backend)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_near(y[:, None], exact, 1e-2, floor=1)
    assert_near(state, exact_state, floor=1)


@settings(few, max_examples=25)
@given(st.sampled_from(BORDERS[:5]), st.sampled_from([1e2, 1e4, 1e6]), st.booleans())
def test_strong_decay(ours, length, strength, everywhere):
    """exp(-A dt), the reciprocal of a decay, overflows here; no NaN may come of it, forwards or backwards."""
    scan = make_scan(length, forgetting=strength)
    if everywhere:
        scan = scan._replace(dt=strength * (0.5 + scan.dt))
    assert_all_near(selective_scan(*scan, backend=ours), truth(scan))
    assert_all_near(gradients(scan, ours), gradients(scan.double(), "reference"))


def test_the_inputs_are_left_alone(ours):
    scan = make_scan(CHUNK + 3)
    before = scan.map(Tensor.clone)
    gradients(scan, ours)
    assert all(torch.equal(m, copy) for m, copy in zip(scan, before, strict=True))


@pytest.mark.parametrize("change", [lambda m: torch.stack([m, m.flip(0)], -1)[..., 0], lambda m: m[:1].expand_as(m)])
def test_any_strides(ours, change):
    scan = make_scan(CHUNK + 3).map(change)
    plain = scan.map(Tensor.contiguous)
    assert_all_near(selective_scan(*scan, backend=ours), selective_scan(*plain, backend=ours), 1e-6)
    assert_all_near(gradients(scan, ours), gradients(plain, ours), 1e-6)


@pytest.mark.parametrize("field", Scan._fields)
def test_nan_propagates(ours, field):
    scan = make_scan(CHUNK + 9).map(Tensor.clone)
    getattr(scan, field)[(0,) if field == "D" else (0, 1) if field == "A" else (1, 2, 0)] = torch.nan
    got, wanted = ([*selective_scan(*scan, backend=backend), *gradients(scan, backend)] for backend in (ours, "reference"))
    for g, w in zip(got, wanted, strict=True):
        assert torch.equal(g.isnan(), w.isnan())


class Recorder(TorchDispatchMode):
    """The names of the operators that ran, and the size of the largest tensor that one made."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.names.add(function.overloadpacket.__name__)
        made = [m for m in (result if isinstance(result, tuple | list) else [result]) if isinstance(m, Tensor)]
        self.largest = max([self.largest, *(m.numel() for m in made)])
        return result


def test_nothing_of_the_size_of_all_states(ours, monkeypatch):
    monkeypatch.setattr(selective_chunked, "CPU_BLOCK", 2**16)
    scan = make_scan(2 * SEGMENT, batch=1, channels=256, size=16).map(lambda m: m.detach().requires_grad_())
    with Recorder() as recorder:
        y, state = selective_scan(*scan, backend=ours)
        (y.sum() + state.sum()).backward()
    assert recorder.largest <= 256 * 16 * 2 * SEGMENT / 8


def test_the_mixer_s_layout_is_read_where_it_is():
    scan = make_scan(CHUNK + 3)
    if reason := SELECTIVE_SCAN.why_not(SELECTIVE_SCAN.backends["native"], *scan):
        pytest.skip(reason)
    with Recorder() as recorder:
        y, _ = selective_scan(*scan, backend="native")
    assert not {name for name in recorder.names if "copy" in name or "clone" in name or "contiguous" in name}
    assert y.transpose(1, 2).is_contiguous()


def test_who_serves():
    scan = make_scan(3)
    assert SELECTIVE_SCAN.choose(*scan.double()).name == "chunked"
    with pytest.raises(KernelError, match="'native' was asked for and cannot serve: it computes in float32"):
        selective_scan(*scan.double(), backend="native")
    with pytest.raises(KernelError, match=r"'stock' .* cannot begin from an initial state"):
        selective_scan(*scan, backend="stock")
    for operation, call in (
        (SELECTIVE_SCAN, scan),
        (SELECTIVE_STEP, (scan.initial_state, scan.x[:, 0], scan.dt[:, 0], *scan[2:])),
    ):
        assert operation.why_not(operation.backends["mamba_ssm"], *call) == "it runs on CUDA devices"


def test_native_refuses_shapes_that_do_not_fit():
    scan = make_scan(5)
    if reason := SELECTIVE_SCAN.why_not(SELECTIVE_SCAN.backends["native"], *scan):
        pytest.skip(reason)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 5\) where \(2, 5, 5\) belongs"):
        selective_scan(*scan._replace(B=scan.B[:, :4]), backend="native")


def test_how_mamba_ssm_is_called(monkeypatch):
    """By a stand-in with its signature: the tensors' order and layout, and its gradient that forgets the final state."""

    def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
        u, delta, B, C = (m.transpose(1, 2) for m in (u, delta, B, C))
        y, state = selective_scan(u, delta, A, B, C, D, backend="chunked")
        return y.transpose(1, 2), state.detach().requires_grad_()

    interface = SimpleNamespace(selective_scan_fn=selective_scan_fn)
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.selective_scan_interface", interface)
    run = SELECTIVE_SCAN.backends["mamba_ssm"].run
    scan = make_scan(9, state=False)
    y, state = run(*scan._replace(x=scan.x.detach().requires_grad_()))
    assert_all_near((y, state), truth(scan))
    y.sum().backward()
    with pytest.raises(NotImplementedError, match="no gradient through the final state"):
        state.sum().backward()
