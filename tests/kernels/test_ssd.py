"""Every backend of the scan and of the step against the recurrence in float64."""

import os
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels import dispatch, native, ssd_native
from surgery.kernels.dispatch import KernelError
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP, ssd_scan, ssd_step
from surgery.kernels.ssd_chunked import CHUNK
from tests.kernels.inputs import Scan, assert_near, lengths, make_scan, scans
from tests.kernels.test_selective import Recorder, inside

few = settings(deadline=None, max_examples=25)
SEGMENT = 4 * CHUNK  # ssd.c keeps the state once in so many tokens
BORDERS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + CHUNK]


@pytest.fixture(scope="session")
def c_kernel():
    if reason := SSD_SCAN.why_not(SSD_SCAN.backends["native"], *make_scan(1), 256):
        pytest.skip(f"native cannot serve here: {reason}")


def each(*names: str) -> list:
    return [pytest.param(name, marks=pytest.mark.usefixtures("c_kernel") if name == "native" else ()) for name in names]


SCANS, STEPS = (each(*(name for name in operation.backends if name != "mamba_ssm")) for operation in (SSD_SCAN, SSD_STEP))
ours = pytest.mark.parametrize("backend", each("native", "chunked"))


def truth(scan: Scan) -> tuple[Tensor, Tensor]:
    return ssd_scan(*scan.double(), backend="reference")


def gradients(scan: Scan, backend: str, outputs: tuple[bool, bool] = (True, True)) -> list[Tensor]:
    """Of a random linear function of the outputs and the final state, by every input that is there."""
    scan = scan.map(lambda m: m.detach().requires_grad_())
    y, state = ssd_scan(*scan, backend=backend)
    g = torch.Generator().manual_seed(0)
    losses = [(m * torch.randn(m.shape, generator=g).to(m.dtype)).sum() for m in (y, state)]
    losses = [loss for loss, wanted in zip(losses, outputs, strict=True) if wanted]
    return list(torch.autograd.grad(losses, [m for m in scan if m is not None], materialize_grads=True))


@ours
@few
@given(scan=scans())
def test_the_scan_equals_the_recurrence(backend, scan):
    y, state = ssd_scan(*scan, backend=backend)
    assert y.dtype == state.dtype == torch.float32
    for actual, exact in zip((y, state), truth(scan), strict=True):
        assert_near(actual, exact)


@ours
@few
@given(scan=scans())
def test_the_scan_in_bfloat16(backend, scan):
    scan = scan.bfloat16()
    y, state = ssd_scan(*scan, backend=backend)
    exact, exact_state = truth(scan)
    assert y.dtype == torch.bfloat16
    assert_near(y, exact, 1e-2)
    assert state.dtype == torch.float32  # only the outputs are rounded: errors in the state would add up over a generation
    assert_near(state, exact_state)


@ours
@few
@given(scan=scans())
def test_gradients(backend, scan):
    for actual, exact in zip(gradients(scan, backend), gradients(scan.double(), "reference"), strict=True):
        assert_near(actual, exact, floor=1)


@ours
def test_gradients_in_bfloat16(backend):
    scan = make_scan(CHUNK + 5).bfloat16()
    actual = gradients(scan, backend)
    assert [m.dtype for m in actual] == [m.dtype for m in scan]
    for gradient, exact in zip(actual, gradients(scan.double(), "reference"), strict=True):
        assert_near(gradient, exact, 1e-2)


@ours
def test_gradients_of_what_is_trained_alone(backend):
    scan = make_scan(CHUNK + 5)
    together = gradients(scan, backend)
    for i, name in enumerate(Scan._fields):
        leaf = getattr(scan, name).clone().requires_grad_()
        y, state = ssd_scan(*scan._replace(**{name: leaf}), backend=backend)
        g = torch.Generator().manual_seed(0)
        sum((m * torch.randn(m.shape, generator=g)).sum() for m in (y, state)).backward()
        torch.testing.assert_close(leaf.grad, together[i], rtol=0, atol=0)


@ours
@pytest.mark.parametrize(("width", "size"), [(16, 16), (17, 33), (33, 130), (64, 128), (130, 3)])
@pytest.mark.parametrize("outputs", [(True, True), (True, False), (False, True)])
def test_sizes(backend, width, size, outputs):
    """More heads in a group than one unit of work of ssd.c has; in the gradients, more than one segment."""
    scan = make_scan(SEGMENT + CHUNK + 3, batch=1, groups=1, per_group=5, width=width, size=size)
    for actual, exact in zip(ssd_scan(*scan, backend=backend), truth(scan), strict=True):
        assert_near(actual, exact)
    exact = gradients(scan.double(), "reference", outputs)
    for gradient, expected in zip(gradients(scan, backend, outputs), exact, strict=True):
        assert_near(gradient, expected, floor=1)


@ours
def test_long(backend):
    scan = make_scan(3001, batch=1, groups=1, per_group=2, forgetting=0.1)
    for actual, exact in zip(ssd_scan(*scan, backend=backend), truth(scan), strict=True):
        assert_near(actual, exact)
    for gradient, exact in zip(gradients(scan, backend), gradients(scan.double(), "reference"), strict=True):
        assert_near(gradient, exact)


@ours
def test_a_constant_time_step_adds_up_no_error(backend):
    """Rounded the same way in every chunk, a decay close to 1 is wrong in the same direction each time."""
    scan = make_scan(2000, batch=1, state=False)
    x, B, dt = torch.ones_like(scan.x), torch.ones_like(scan.B), torch.full_like(scan.dt, 1e-3)
    scan = scan._replace(x=x, B=B, dt=dt)
    for actual, exact in zip(ssd_scan(*scan, backend=backend), truth(scan), strict=True):
        assert_near(actual, exact)


# transformers' own carries the state less exactly where tokens forget strongly, hence gentle decay here.
@ours
@few
@given(scan=scans(forgetting=(0.1, 1.0)), chunk_size=st.sampled_from([8, 32, 256]))
def test_stock_equals_ours(backend, scan, chunk_size):
    stock, own = (ssd_scan(*scan, chunk_size=chunk_size, backend=name) for name in ("stock", backend))
    for actual, expected in zip(stock, own, strict=True):
        assert_near(actual, expected, 5e-5)


@pytest.mark.parametrize("length", BORDERS)
@pytest.mark.parametrize("backend", SCANS)
def test_chunk_borders(length, backend):
    """Whatever hypothesis happens to draw, every backend sees these lengths."""
    scan = make_scan(length)
    for actual, exact in zip(ssd_scan(*scan, backend=backend), truth(scan), strict=True):
        assert_near(actual, exact, 5e-5)


@ours
@few
@given(scan=scans(st.integers(2, 3 * CHUNK)), data=st.data())
def test_a_sequence_in_two_parts(backend, scan, data):
    cut = data.draw(st.integers(1, scan.x.shape[1] - 1))
    whole, end = ssd_scan(*scan, backend=backend)
    first, second = (Scan(*(m[:, part] if i in (0, 1, 3, 4) else m for i, m in enumerate(scan))) for part in split_at(cut))
    y, state = ssd_scan(*first, backend=backend)
    z, state = ssd_scan(*second._replace(initial_state=state), backend=backend)
    assert_near(torch.cat([y, z], 1), whole)
    assert_near(state, end)


def split_at(cut: int) -> tuple[slice, slice]:
    return slice(cut), slice(cut, None)


@pytest.mark.parametrize("backend", STEPS)
@few
@given(scan=scans(st.integers(1, 12)))
def test_steps_equal_the_scan(backend, scan):
    x, dt, A, B, C, D, initial_state = scan
    exact, exact_state = truth(scan)
    b, t, h, p = x.shape
    state = torch.zeros(b, h, p, B.shape[-1]) if initial_state is None else initial_state.clone()
    cache = state
    y = [ssd_step(state, x[:, i], dt[:, i], A, B[:, i], C[:, i], D, backend=backend) for i in range(t)]
    assert_near(torch.stack(y, 1), exact)
    assert_near(cache, exact_state)  # updated in place


@pytest.mark.parametrize("backend", STEPS)
def test_a_step_in_bfloat16_keeps_the_state_in_float32(backend):
    scan = make_scan(1).bfloat16()
    x, dt, A, B, C, D, state = scan
    exact, exact_state = truth(scan)
    y = ssd_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, backend=backend)
    assert y.dtype == torch.bfloat16
    assert_near(y[:, None], exact, 1e-2)
    assert state.dtype == torch.float32
    assert_near(state, exact_state, 1e-5 if backend in ("native", "torch") else 1e-2)  # stock forms dt B in bfloat16


@ours
@few
@given(length=lengths, strength=st.sampled_from([1e2, 1e4, 1e6]), everywhere=st.booleans())
def test_strong_decay(backend, length, strength, everywhere):
    """exp(-A dt), the reciprocal of a decay, overflows here; no NaN may come of it, forwards or backwards."""
    scan = make_scan(length, forgetting=strength)
    if everywhere:
        scan = scan._replace(dt=strength * (0.5 + scan.dt))
    assert (scan.dt * scan.A).min() < -88 or not everywhere
    for actual, exact in zip(ssd_scan(*scan, backend=backend), truth(scan), strict=True):
        assert_near(actual, exact)
    for gradient in gradients(scan, backend):
        assert gradient.isfinite().all()


@ours
def test_the_initial_state_and_the_inputs_are_left_alone(backend):
    scan = make_scan(CHUNK + 3)
    before = scan.map(Tensor.clone)
    gradients(scan, backend)
    assert all(torch.equal(m, copy) for m, copy in zip(scan, before, strict=True))


def test_slices_of_larger_tensors():
    """The mixer hands over slices of one projection: no backend may rely on contiguous memory."""
    scan = make_scan(CHUNK + 3)
    sliced = scan.map(lambda m: torch.stack([m, m.flip(0)], -1)[..., 0])
    assert not sliced.x.is_contiguous()
    for backend in SCANS:
        for actual, expected in zip(ssd_scan(*sliced, backend=backend), ssd_scan(*scan, backend=backend), strict=True):
            torch.testing.assert_close(actual, expected)
