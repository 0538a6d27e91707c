"""Laws of the gated delta rule."""

import pytest
import torch

from surgery.kernels.delta import delta_rule, delta_step
from surgery.modeling import delta_reference
from surgery.modeling.packing import Packing
from tests.kernels.inputs import distance, randn, with_gradients


def make(by_channel: bool, t: int = 70, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v, log_decay, beta and an initial state."""
    b, h, g, n, p = 2, 4, 2, 8, 12
    q, k, v = randn(b, t, g, n, dtype=dtype), randn(b, t, g, n, dtype=dtype, seed=1), randn(b, t, h, p, dtype=dtype)
    decay = -0.3 * randn(*(b, t, h, n)[: 4 if by_channel else 3], dtype=dtype).abs()
    return [q, k, v, decay, randn(b, t, h, dtype=dtype).sigmoid(), randn(b, h, n, p, dtype=dtype)]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("t", [1, 16, 70])
def test_results_and_gradients_are_those_of_the_plain_rule(by_channel, t):
    args = make(by_channel, t)
    own, truths = with_gradients(delta_rule, args), with_gradients(delta_reference.delta_rule, args)
    assert all(distance(m, truth) < 1e-12 for m, truth in zip(own, truths, strict=True))


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_step_is_a_scan_of_one_token(by_channel):
    *args, state = make(by_channel, t=1)
    y, end = delta_rule(*args, state)
    own = delta_step(state, *(m[:, 0] for m in args))
    assert distance(own, y[:, 0]) < 1e-12
    assert distance(state, end) < 1e-12


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precision(by_channel, dtype):
    args = make(by_channel, dtype=dtype)
    y, _ = delta_rule(*args)
    truth, _ = delta_rule(*(m.double() for m in args))
    assert distance(y, truth) < (2e-6 if dtype == torch.float32 else 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(delta_rule(*args)[0], y)


def test_packed_documents_do_not_see_each_other():
    *args, _ = make(False)
    y, _ = delta_rule(*args, packing=Packing.of(torch.tensor([[0] * 30 + [1] * 40, [0] * 70])))
    assert distance(y[:1, 30:], delta_rule(*(m[:1, 30:] for m in args))[0]) < 1e-12
