"""Every backend of Lightning attention against the recurrence in float64."""

import pytest
import torch
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from surgery.kernels.lightning import LIGHTNING_SCAN, lightning_scan
from tests.kernels.inputs import assert_backends_agree, assert_near

BLOCK = 8
BORDERS = [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5]


def make(t: int, *, state: bool = True) -> list:
    """The arguments of lightning_scan in float32; heads forget at very different rates."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, t, 4, 6, generator=g) for _ in range(3))
    return [q, k, v, torch.tensor([2e-5, 0.01, 0.3, 1.5]), torch.randn(2, 4, 6, 6, generator=g) if state else None]


def double(arguments: list) -> list:
    return [None if m is None else m.double() for m in arguments]


@pytest.mark.parametrize("t", BORDERS)
@pytest.mark.parametrize("backend", LIGHTNING_SCAN.backends)
@pytest.mark.parametrize("state", [True, False])
def test_the_scan_equals_the_recurrence(backend, t, state):
    arguments = make(t, state=state)
    for actual, exact in zip(
        lightning_scan(*arguments, block_size=BLOCK, backend=backend),
        lightning_scan(*double(arguments), backend="reference"), strict=True,
    ):  # fmt: skip
        assert actual.dtype == torch.float32
        assert_near(actual, exact, 1e-5)


def test_the_scan_in_float64_and_its_gradient():
    def scan(leaves, backend):
        return lightning_scan(*leaves, backend=backend)

    assert_backends_agree(scan, double(make(29)), ("ssd", "reference"), 1e-11)


def test_nothing_gives_nothing():
    q, k, v, slope, state = make(4)
    y, kept = lightning_scan(q[:, :0], k[:, :0], v[:, :0], slope, state)
    assert y.shape == (2, 0, 4, 6)
    assert kept is state


@pytest.mark.parametrize("t", [1, 2 * BLOCK + 5])
def test_stock_is_what_transformers_computes_bit_for_bit(t):
    """The whole module, around whose scan there is nothing here."""
    torch.manual_seed(0)
    config = MiniMaxConfig(hidden_size=24, num_attention_heads=4, head_dim=6, num_hidden_layers=4, block_size=BLOCK)
    module = MiniMaxLightningAttention(config, layer_idx=1)
    u = torch.randn(2, t, 24)
    with torch.no_grad():
        theirs, _ = module(u, None, None)
        qkv = module.act_fn(module.qkv_proj(u)).view(2, t, 4, 18).split(6, -1)
        y, _ = lightning_scan(*qkv, module.slope_rate.flatten(), block_size=BLOCK, backend="stock")
        assert torch.equal(module.out_proj(torch.sigmoid(module.output_gate(u)) * module.norm(y.flatten(2))), theirs)
