"""Laws of the scans, steps and the convolution, of every backend that serves on a CPU."""

import pytest
import torch

from surgery.kernels.conv import CAUSAL_CONV, causal_conv
from surgery.kernels.selective import SELECTIVE_SCAN, selective_scan, selective_step
from surgery.kernels.ssd import SSD_SCAN, ssd_scan, ssd_step
from surgery.modeling import reference
from surgery.modeling.packing import Packing
from tests.kernels import inputs
from tests.kernels.inputs import distance, randn, with_gradients

SCANS = [
    *(
        pytest.param(ssd_scan, reference.ssd_scan, inputs.ssd, name, id=f"ssd-{name}")
        for name in ("native", "chunked", "reference")
    ),
    *(
        pytest.param(selective_scan, reference.selective_scan, inputs.selective, name, id=f"selective-{name}")
        for name in ("native", "chunked", "reference")
    ),
]
STEPS = [
    pytest.param(ssd_scan, ssd_step, inputs.ssd, id="ssd"),
    pytest.param(selective_scan, selective_step, inputs.selective, id="selective"),
]
NUMBERS = torch.tensor([[0] * 20 + [1] * 81 + [2] * 49, [0] * 64 + [-1] * 6 + [1] * 80])


@pytest.mark.parametrize(("scan", "plain", "make", "backend"), SCANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_are_those_of_the_plain_scan(scan, plain, make, backend, dtype):
    args = make(dtype=dtype)
    own = with_gradients(lambda *each: scan(*each, backend=backend), args)
    truths = with_gradients(plain, args, exact=True)
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    assert all(distance(m, truth) < bound for m, truth in zip(own, truths, strict=True))


@pytest.mark.parametrize(("scan", "plain", "make", "backend"), SCANS)
def test_a_scan_goes_on_from_its_state(scan, plain, make, backend):
    x, dt, A, B, C, D, state = make()
    whole, end = scan(x, dt, A, B, C, D, state, backend=backend)
    _, middle = scan(x[:, :61], dt[:, :61], A, B[:, :61], C[:, :61], D, state, backend=backend)
    rest, last = scan(x[:, 61:], dt[:, 61:], A, B[:, 61:], C[:, 61:], D, middle, backend=backend)
    assert distance(rest, whole[:, 61:]) < 2e-6
    assert distance(last, end) < 2e-6


@pytest.mark.parametrize(("scan", "plain", "make", "backend"), SCANS)
def test_packed_documents_do_not_see_each_other(scan, plain, make, backend):
    x, dt, A, B, C, D, _ = make()
    packing = Packing.of(NUMBERS)
    y, state = scan(x, dt, A, B, C, D, packing=packing, backend=backend)
    assert state is None
    for row, at in ((0, slice(20, 101)), (1, slice(70, 150))):
        alone, _ = scan(x[row, at][None], dt[row, at][None], A, B[row, at][None], C[row, at][None], D, backend=backend)
        assert distance(y[row, at], alone[0]) < 2e-6
    assert not y[1, 64:70].any()


@pytest.mark.parametrize(("scan", "step", "make"), STEPS)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_step_is_a_scan_of_one_token(scan, step, make, backend):
    x, dt, A, B, C, D, state = make(t=1)
    y, end = scan(x, dt, A, B, C, D, state)
    own = step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, backend=backend)
    assert distance(own, y[:, 0]) < 1e-6
    assert distance(state, end) < 1e-6


def test_documents_in_one_call_are_documents_one_by_one():
    """What a GPU's kernels are given: the reference takes them as they do."""
    x, dt, A, B, C, D, _ = inputs.ssd(dtype=torch.float64)
    packing = Packing.of(NUMBERS.clamp_min(0))
    own, _ = SSD_SCAN.reference.run(x, dt, A, B, C, D, None, packing.seq_idx, 256)
    assert distance(own, ssd_scan(x, dt, A, B, C, D, packing=packing)[0]) < 1e-12
    weight, bias = randn(24, 1, 4, dtype=torch.float64), randn(24, dtype=torch.float64)
    x = randn(2, 150, 24, dtype=torch.float64)
    own = CAUSAL_CONV.reference.run(x, weight, bias, packing.seq_idx, 150, True)
    assert distance(own, causal_conv(x, weight, bias, 150, True, packing=packing)) < 1e-12


@pytest.mark.parametrize("backend", ["shifted", "stock", "reference"])
@pytest.mark.parametrize(("s", "t"), [(40, 40), (40, 3), (2, 2), (40, 1), (1, 1)])
def test_convolution(backend, s, t):
    args = [randn(2, s, 24), randn(24, 1, 4), randn(24)]
    own = with_gradients(lambda *each: causal_conv(*each, t, True, backend=backend), args)
    truths = with_gradients(lambda *each: reference.causal_conv(*each, t, True), args, exact=True)
    assert all(distance(m, truth) < 1e-6 for m, truth in zip(own, truths, strict=True))


@pytest.mark.parametrize("operation", [SSD_SCAN, SELECTIVE_SCAN], ids=lambda operation: operation.name)
def test_a_compiler_takes_a_scan_as_one_node(operation):
    args = inputs.ssd()[:6] if operation is SSD_SCAN else inputs.selective()[:6]
    scan = ssd_scan if operation is SSD_SCAN else selective_scan
    compiled = torch.compile(lambda *each: scan(*each)[0] * 2, backend="aot_eager", fullgraph=True)
    own = with_gradients(compiled, args)
    truths = with_gradients(lambda *each: scan(*each)[0] * 2, args)
    assert all(distance(m, truth) < 1e-6 for m, truth in zip(own, truths, strict=True))
