"""Every backend of the norm against its formula in float64, and against the modules of transformers, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm, MambaRMSNormGated

from surgery.kernels.norm import RMS_NORM, rms_norm
from tests.kernels.inputs import assert_near

few = settings(deadline=None, max_examples=15)
ON_CPU = [name for name in RMS_NORM.backends if name != "mamba_ssm"]


def make(b: int, t: int, groups: int, group: int, gated: bool, seed: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
    g = torch.Generator().manual_seed(seed)
    c = groups * group
    wide = torch.randn(b, t, 2 * c + 3, generator=g)  # the gate is a part of a wider projection
    return torch.randn(b, t, c, generator=g), torch.randn(c, generator=g), wide[..., 2 : 2 + c] if gated else None, group


inputs = st.builds(
    make, st.integers(1, 2), st.integers(1, 40), st.integers(1, 3), st.integers(1, 37), st.booleans(), st.integers(0, 2**16)
)


def formula(x: Tensor, weight: Tensor, gate: Tensor | None, group: int) -> Tensor:
    v = x.double() if gate is None else x.double() * gate.double() * gate.double().sigmoid()
    parts = v.split(group, dim=-1)
    return weight.double() * torch.cat([part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in parts], -1)


@pytest.mark.parametrize("backend", ON_CPU)
@few
@given(inputs)
def test_equals_its_formula(backend, given_inputs):
    x, weight, gate, group = given_inputs
    before = x.clone()
    y = rms_norm(x, weight, 1e-5, gate, group, backend=backend)
    assert_near(y, formula(x, weight, gate, group), floor=1)
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", [name for name in ON_CPU if name != "reference"])
@few
@given(inputs)
def test_gradients(backend, given_inputs):
    x, weight, gate, group = given_inputs

    def gradients(dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
        leaves = [m.to(dtype).requires_grad_() for m in (x, weight, gate) if m is not None]
        y = rms_norm(leaves[0], leaves[1], 1e-5, leaves[2] if len(leaves) > 2 else None, group, backend=backend)
        return torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), leaves)

    for actual, truth in zip(gradients(torch.float, backend), gradients(torch.double, "reference"), strict=True):
        assert_near(actual, truth, floor=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_is_what_transformers_computes(dtype):
    x, weight, gate, group = make(2, 9, 2, 12, True, 0)
    assert gate is not None
    x, weight, gate = (m.to(dtype) for m in (x, weight, gate))
    plain, gated = Mamba2RMSNorm(24, eps=1e-5).to(dtype), MambaRMSNormGated(24, group, eps=1e-5).to(dtype)
    for module in (plain, gated):
        module.weight.data.copy_(weight)
    assert torch.equal(rms_norm(x, weight, 1e-5, backend="stock"), plain(x))
    assert torch.equal(rms_norm(x, weight, 1e-5, gate, group, backend="stock"), gated(x, gate))


@pytest.mark.parametrize("backend", ["native", "stock"])
def test_bfloat16_is_close(backend):
    x, weight, gate, group = make(2, 64, 1, 48, True, 0)
    assert gate is not None
    x, weight, gate = (m.bfloat16() for m in (x, weight, gate))
    y = rms_norm(x, weight, 1e-5, gate, group, backend=backend)
    assert y.dtype == torch.bfloat16
    assert_near(y, formula(x, weight, gate, group), 1e-2)
