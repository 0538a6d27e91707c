"""On a GPU, against the reference in float64. `make gpu` runs this, and asks every operation by itself (tools/gpu.py)."""

import pytest
import torch

from surgery.kernels.attention import attend
from surgery.kernels.conv import causal_conv
from surgery.kernels.ssd import ssd_scan
from surgery.modeling.packing import Packing
from tests.kernels import inputs
from tests.kernels.inputs import distance, randn, with_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NUMBERS = torch.tensor([[0] * 20 + [1] * 81 + [2] * 49, [0] * 64 + [-1] * 6 + [1] * 80])
BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_documents_in_one_call_are_documents_one_by_one(dtype):
    """With the gradients; on the CPU each document is a row of its own."""
    x, dt, A, B, C, D, _ = inputs.ssd(h=4, p=64, n=64, dtype=dtype)
    attention = [m.to(dtype) for m in inputs.attention(t=150, s=150, w=128, p=64, dtype=torch.float32).values()]
    convolution = [randn(2, 150, 64, dtype=dtype), randn(64, 1, 4, dtype=dtype), randn(64, dtype=dtype)]
    calls = {
        "scan": (lambda *each, packing: ssd_scan(*each, packing=packing)[0], [x, dt, A, B, C, D]),
        "convolution": (lambda *each, packing: causal_conv(*each, 150, True, packing=packing), convolution),
        "attention": (lambda *each, packing: attend(*each, packing=packing), attention),
    }
    for name, (run, args) in calls.items():
        own = with_gradients(lambda *each: run(*each, packing=Packing.of(NUMBERS.cuda())), [m.cuda() for m in args])  # noqa: B023
        truths = with_gradients(lambda *each: run(*each, packing=Packing.of(NUMBERS)), args, exact=True)  # noqa: B023
        assert all(distance(m, truth) < BOUNDS[dtype] for m, truth in zip(own, truths, strict=True)), name
