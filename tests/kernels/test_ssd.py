"""Every backend of the scan and of the step against the recurrence in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels.ssd import SSD_SCAN, SSD_STEP, ssd_scan, ssd_step
from surgery.kernels.ssd_chunked import CHUNK
from tests.kernels.inputs import Scan, assert_near, lengths, make_scan, scans

few = settings(deadline=None, max_examples=25)
SCANS, STEPS = ([name for name in operation.backends if name != "mamba_ssm"] for operation in (SSD_SCAN, SSD_STEP))


def truth(scan: Scan) -> tuple[Tensor, Tensor]:
    return ssd_scan(*scan.double(), backend="reference")


def gradients(scan: Scan, backend: str) -> list[Tensor]:
    """Of a random linear function of the outputs and the final state, by every input that is there."""
    scan = scan.map(lambda m: m.detach().clone().requires_grad_())
    y, state = ssd_scan(*scan, backend=backend)
    g = torch.Generator().manual_seed(0)
    losses = [(m * torch.randn(m.shape, generator=g).to(m.dtype)).sum() for m in (y, state)]
    return list(torch.autograd.grad(losses, [m for m in scan if m is not None]))


@few
@given(scans())
def test_chunked_equals_the_recurrence(scan):
    y, state = ssd_scan(*scan, backend="chunked")
    assert y.dtype == state.dtype == torch.float32
    for actual, exact in zip((y, state), truth(scan), strict=True):
        assert_near(actual, exact)


@few
@given(scans())
def test_chunked_in_bfloat16(scan):
    scan = scan.bfloat16()
    y, state = ssd_scan(*scan, backend="chunked")
    exact, exact_state = truth(scan)
    assert y.dtype == torch.bfloat16
    assert_near(y, exact, 1e-2)
    assert state.dtype == torch.float32  # only the outputs are rounded: errors in the state would add up over a generation
    assert_near(state, exact_state)


@few
@given(scans())
def test_gradients_of_chunked(scan):
    for actual, exact in zip(gradients(scan, "chunked"), gradients(scan.double(), "reference"), strict=True):
        assert_near(actual, exact, floor=1)


# transformers' own carries the state less exactly where tokens forget strongly, hence gentle decay here.
@few
@given(scans(forgetting=(0.1, 1.0)), st.sampled_from([8, 32, 256]))
def test_stock_equals_chunked(scan, chunk_size):
    stock, chunked = (ssd_scan(*scan, chunk_size=chunk_size, backend=backend) for backend in ("stock", "chunked"))
    for actual, expected in zip(stock, chunked, strict=True):
        assert_near(actual, expected, 5e-5)


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
@pytest.mark.parametrize("backend", SCANS)
def test_chunk_borders(length, backend):
    """Whatever hypothesis happens to draw, every backend sees these lengths."""
    scan = make_scan(length)
    for actual, exact in zip(ssd_scan(*scan, backend=backend), truth(scan), strict=True):
        assert_near(actual, exact, 5e-5)


@few
@given(scans(st.integers(2, 3 * CHUNK)), st.data())
def test_a_sequence_in_two_parts(scan, data):
    cut = data.draw(st.integers(1, scan.x.shape[1] - 1))
    whole, end = ssd_scan(*scan)
    first, second = (Scan(*(m[:, part] if i in (0, 1, 3, 4) else m for i, m in enumerate(scan))) for part in split_at(cut))
    y, state = ssd_scan(*first)
    z, state = ssd_scan(*second._replace(initial_state=state))
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
    assert_near(state, exact_state, 1e-5 if backend == "torch" else 1e-2)  # stock forms dt B in bfloat16


@few
@given(lengths, st.sampled_from([1e2, 1e4, 1e6]), st.booleans())
def test_strong_decay(length, strength, everywhere):
    """exp(-A dt), the reciprocal of a decay, overflows here; no NaN may come of it, forwards or backwards."""
    scan = make_scan(length, forgetting=strength)
    if everywhere:
        scan = scan._replace(dt=strength * (0.5 + scan.dt))
    assert (scan.dt * scan.A).min() < -88 or not everywhere
    for actual, exact in zip(ssd_scan(*scan), truth(scan), strict=True):
        assert_near(actual, exact)
    for gradient in gradients(scan, "chunked"):
        assert gradient.isfinite().all()


def test_the_initial_state_and_the_inputs_are_left_alone():
    scan = make_scan(CHUNK + 3)
    before = scan.map(Tensor.clone)
    ssd_scan(*scan)
    assert all(torch.equal(m, copy) for m, copy in zip(scan, before, strict=True))


def test_slices_of_larger_tensors():
    """The mixer hands over slices of one projection: no backend may rely on contiguous memory."""
    scan = make_scan(CHUNK + 3)
    sliced = scan.map(lambda m: torch.stack([m, m.flip(0)], -1)[..., 0])
    assert not sliced.x.is_contiguous()
    for backend in SCANS:
        for actual, expected in zip(ssd_scan(*sliced, backend=backend), ssd_scan(*scan, backend=backend), strict=True):
            torch.testing.assert_close(actual, expected)
