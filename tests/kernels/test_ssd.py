"""Every backend of the scan and of the step against the recurrence in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels import native, probing, ssd_native
from surgery.kernels.dispatch import KernelError
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP, ssd_scan, ssd_step
from surgery.kernels.ssd_chunked import CHUNK
from tests.kernels.inputs import Scan, assert_near, lengths, make_scan, scans
from tests.kernels.test_selective import Recorder, inside

few = settings(deadline=None, max_examples=25)
SEGMENT = 4 * CHUNK  # ssd.c keeps the state once in so many tokens
BORDERS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + CHUNK]


SCANS, STEPS = ([name for name in operation.backends if name != "mamba_ssm"] for operation in (SSD_SCAN, SSD_STEP))
ours = pytest.mark.parametrize("backend", ["native", "chunked"])


@pytest.fixture(autouse=True)
def _skips_what_cannot_serve(request):
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if backend == "native" and (reason := SSD_SCAN.why_not(SSD_SCAN.backends[backend], *make_scan(1), 256)):
        pytest.skip(f"{backend} cannot serve here: {reason}")


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
    for name in ("stock", backend):
        for actual, exact in zip(ssd_scan(*scan, chunk_size=chunk_size, backend=name), truth(scan), strict=True):
            assert_near(actual, exact, 5e-5)


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
    whole, end = truth(scan)
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
    for gradient, exact in zip(gradients(scan, backend), gradients(scan.double(), "reference"), strict=True):
        assert_near(gradient, exact, floor=1)


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
        for actual, exact in zip(ssd_scan(*sliced, backend=backend), truth(scan), strict=True):
            assert_near(actual, exact)


@ours
@pytest.mark.parametrize(
    "change", [lambda m: torch.stack([m, m.flip(0)], -1)[..., 0], lambda m: m[:1].expand_as(m), lambda m: m.mT.contiguous().mT]
)
def test_any_strides(backend, change):
    scan = make_scan(CHUNK + 3).map(lambda m: change(m) if m.ndim > 1 else m)
    plain = scan.map(Tensor.contiguous)
    for actual, exact in zip(ssd_scan(*scan, backend=backend), truth(plain), strict=True):
        assert_near(actual, exact)
    for gradient, exact in zip(gradients(scan, backend), gradients(plain.double(), "reference"), strict=True):
        assert_near(gradient, exact, floor=1)


def mixer(scan: Scan) -> Scan:
    """As the model's mixer hands them over: parts of larger tensors, whose other parts are NaN here."""
    (b, t, h, p), (g, n) = scan.x.shape, scan.B.shape[2:]
    together = torch.cat([m.flatten(2) for m in (scan.x, scan.B, scan.C)], 2)
    x, B, C = inside(together, (0, 5, 3)).split([h * p, g * n, g * n], 2)
    dt = inside(scan.dt, (0, 2, 7))
    return scan._replace(x=x.view(b, t, h, p), dt=dt, B=B.view(b, t, g, n), C=C.view(b, t, g, n))


@ours
@pytest.mark.parametrize("length", BORDERS)
def test_nothing_around_the_inputs_is_read(backend, length):
    scan = make_scan(length)
    for actual, exact in zip(ssd_scan(*mixer(scan), backend=backend), truth(scan), strict=True):
        assert_near(actual, exact)
    for gradient, exact in zip(gradients(mixer(scan), backend), gradients(scan.double(), "reference"), strict=True):
        assert_near(gradient, exact, floor=1)


@pytest.mark.parametrize("backend", ["native"])
def test_the_mixer_s_layout_is_read_where_it_is(backend):
    scan = mixer(make_scan(CHUNK + 3))
    with Recorder() as recorder:
        ssd_scan(*scan, backend=backend)
    assert not {name for name in recorder.names if "copy" in name or "clone" in name or "contiguous" in name}


@pytest.mark.parametrize("backend", ["native"])
@pytest.mark.parametrize("batch", [1, 2])
def test_threads_change_nothing(backend, batch):
    scan = make_scan(SEGMENT + CHUNK + 3, batch=batch, per_group=9)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([*ssd_scan(*scan, backend=backend), *gradients(scan, backend)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(m, n) for m, n in zip(results[0], other, strict=True))


@ours
@pytest.mark.parametrize("field", Scan._fields)
def test_nan_propagates(backend, field):
    """To whatever it reaches, and to no other sequence. Within a chunk it may reach earlier tokens."""
    scan = make_scan(CHUNK + 9).map(Tensor.clone)
    getattr(scan, field)[1 if field in ("A", "D") else (1, 2, 0)] = torch.nan
    got, wanted = ([*ssd_scan(*scan, backend=name), *gradients(scan, name)] for name in (backend, "reference"))
    for g, w in zip(got, wanted, strict=True):
        assert not (w.isnan() & ~g.isnan()).any()
    if field not in ("A", "D"):
        assert got[0][0].isfinite().all()
        assert got[1][0].isfinite().all()


@pytest.mark.parametrize("backend", ["native"])
def test_nan_leaves_nothing_behind(backend):
    """A worker's space serves one unit of work after the other."""
    scan = make_scan(CHUNK + 9).map(Tensor.clone)
    expected = [*ssd_scan(*scan, backend=backend), *gradients(scan, backend)[:2]]
    for m in scan[:2]:
        m[0] = torch.nan
    for actual, m in zip([*ssd_scan(*scan, backend=backend), *gradients(scan, backend)[:2]], expected, strict=True):
        assert torch.equal(actual[1], m[1])


@ours
def test_an_empty_sequence(backend):
    scan = make_scan(0)
    if backend == "native":
        assert SSD_SCAN.why_not(SSD_SCAN.backends[backend], *scan, 256) == "there is nothing to compute"
    else:
        y, state = ssd_scan(*scan, backend=backend)
        assert y.shape == scan.x.shape
        assert torch.equal(state, scan.initial_state)


def test_who_serves():
    scan = make_scan(3)
    step = (scan.initial_state, scan.x[:, 0], scan.dt[:, 0], scan.A, scan.B[:, 0], scan.C[:, 0], scan.D)
    assert SSD_SCAN.choose(*scan.double(), 256).name == "chunked"
    assert SSD_STEP.choose(step[0].double(), *step[1:]).name == "torch"
    assert SSD_STEP.choose(step[0].mT.contiguous().mT, *step[1:]).name == "torch"
    with pytest.raises(KernelError, match="'native' was asked for and cannot serve: it computes in float32"):
        ssd_scan(*scan.double(), backend="native")
    for operation, call in ((SSD_SCAN, (*scan, 256)), (SSD_STEP, step)):
        native_backend = operation.backends["native"]
        assert native_backend.refuses(*(m.to("meta") if isinstance(m, Tensor) else m for m in call)) == "it runs on a CPU"
    assert SSD_STEP.backends["native"].refuses(step[0], step[1].clone().requires_grad_(), *step[2:]) == "it has no gradient"


@pytest.mark.parametrize("backend", ["native"])
def test_native_refuses_shapes_that_do_not_fit(backend):
    x, dt, A, B, C, D, state = make_scan(5)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 2, 5\) where \(2, 5, 2, 5\) belongs"):
        ssd_scan(x, dt, A, B[:, :4], C, D, state, backend=backend)
    with pytest.raises(ValueError, match="3 heads in 2 groups"):
        ssd_scan(x[:, :, :3], dt[..., :3], A[:3], B, C, D[:3], state[:, :3], backend=backend)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) where \(2, 4\) belongs"):
        ssd_step(state, x[:, 0], dt[:, 0, :3], A, B[:, 0], C[:, 0], D, backend=backend)


@pytest.fixture
def _nothing_known_of_earlier_attempts():
    def forget():
        native.load.cache_clear()
        ssd_native._function.cache_clear()
        probing.forget()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("_nothing_known_of_earlier_attempts")
def test_an_exported_checkpoint_is_served_without_the_c_file(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    scan = make_scan(3)
    assert SSD_SCAN.choose(*scan, 256).name == "chunked"
    with pytest.raises(KernelError, match=r"'native' .* cannot serve: RuntimeError: ssd\.c is not here"):
        ssd_scan(*scan, backend="native")
