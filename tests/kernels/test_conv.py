"""Every backend of the causal convolution against a loop in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels.conv import CAUSAL_CONV, causal_conv
from tests.kernels.inputs import assert_near

few = settings(deadline=None, max_examples=15)
ON_CPU = [name for name in CAUSAL_CONV.backends if name != "causal_conv1d"]


def make(b: int, s: int, c: int, k: int, bias: bool, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(b, s, c, generator=g), torch.randn(c, 1, k, generator=g)
    return x, weight, torch.randn(c, generator=g) if bias else None


inputs = st.builds(
    make, st.integers(1, 2), st.integers(1, 40), st.integers(1, 37), st.integers(1, 5), st.booleans(), st.integers(0, 2**16)
)


def loop(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = False) -> Tensor:
    y = torch.zeros(x.shape, dtype=torch.double)
    for t in range(x.shape[1]):
        for i in range(min(weight.shape[-1], t + 1)):
            y[:, t] += weight[:, 0, -1 - i].double() * x[:, t - i].double()
    y = y if bias is None else y + bias.double()
    return y * y.sigmoid() if silu else y


@pytest.mark.parametrize("backend", ON_CPU)
@few
@given(given_inputs=inputs, silu=st.booleans(), data=st.data())
def test_equals_a_loop(backend, given_inputs, silu, data):
    x, weight, bias = given_inputs
    t, before = data.draw(st.integers(1, x.shape[1])), x.clone()
    with torch.no_grad():
        y = causal_conv(x, weight, bias, t, silu, backend=backend)
    assert torch.equal(x, before)
    assert_near(y, loop(x, weight, bias, silu)[:, -t:], floor=1)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)  # as a cache hands it over
    assert_near(causal_conv(turned, weight, bias, t, silu, backend=backend), y.double(), floor=1)


@pytest.mark.parametrize("backend", [name for name in ON_CPU if name != "reference"])
@few
@given(given_inputs=inputs, silu=st.booleans(), data=st.data())
def test_gradients(backend, given_inputs, silu, data):
    t = data.draw(st.integers(1, given_inputs[0].shape[1]))

    def gradients(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [m.to(dtype).requires_grad_() for m in given_inputs if m is not None]
        y = causal_conv(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, t, silu, backend=backend)
        return torch.autograd.grad((y * torch.arange(1, y.numel() + 1).view(y.shape)).sum(), leaves)

    for actual, truth in zip(gradients(backend, torch.float), gradients("reference", torch.double), strict=True):
        assert_near(actual, truth, floor=1)


@pytest.mark.parametrize("backend", ON_CPU)
def test_the_activation_at_extremes(backend):
    x = torch.tensor([-1e30, -200.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 200.0, 1e30])[None, :, None]
    y = causal_conv(x, torch.ones(1, 1, 1), None, 10, True, backend=backend)
    torch.testing.assert_close(y, torch.nn.functional.silu(x.double()).float(), rtol=1e-5, atol=1e-30)


def test_bfloat16_is_rounded_once():
    x, weight, bias = (m.bfloat16() for m in make(2, 64, 8, 4, True, 0) if m is not None)
    y = causal_conv(x, weight, bias, 64)
    assert y.dtype == torch.bfloat16
    assert_near(y, loop(x, weight, bias), 5e-3)
