"""flex_attention against the loop in float64, where it runs without a GPU, and where it would serve on one."""

from itertools import product

import pytest
import torch

from surgery.kernels import flex_attention, probing
from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from surgery.kernels.dispatch import KernelError
from tests.kernels.inputs import assert_near
from tests.kernels.test_attention import loop, padding
from tests.kernels.test_triton_attention import make

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
FLEX = GRAFT_ATTENTION.backends["flex"]


@pytest.mark.parametrize(("w", "dv"), [(129, 64), (17, 4), (8, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_a_loop(dtype, w, dv):
    """Queries at the end of the keys, one of decoding too; keys that are missing; masks of pairs; rows that see nothing."""
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for t, past, (missing, left) in product((1, 20, 130), (0, 7), ((0.0, 0), (0.3, 5))):
        call = make(t=t, past=past, w=w, dv=dv, pairs=2, missing=missing, left=left).to(dtype)
        exact = tuple(m.double() for m in call[:3])
        pairs = None if call.mask is None else padding(2, t, t + past, [0]) & call.mask[:, None, None]
        truth = loop(*exact, pairs)
        for mask in (call.mask, pairs):
            assert_near(graft_attention(*call[:3], mask, backend="flex"), truth, bound, floor=1)


def test_without_a_gpu_it_serves_by_name_and_forward():
    call = make(t=20)
    assert GRAFT_ATTENTION.choose(*call).name == "sdpa"
    with pytest.raises(KernelError, match="no backward pass"):
        graft_attention(call.q.requires_grad_(), call.k, call.v, backend="flex")
    with pytest.raises(KernelError, match="boolean masks"):
        graft_attention(*make(t=3, past=0)[:3], torch.zeros(2, 1, 3, 3), backend="flex")


def test_where_it_serves_on_a_gpu(monkeypatch):
    """What torch's kernels would store the scores of, and what none of the others takes."""
    monkeypatch.setattr(flex_attention, "on_gpu", lambda _: True)
    monkeypatch.setattr(flex_attention, "_compiled", flex_attention._flex)
    monkeypatch.setattr(probing, "_outcomes", {})

    def server(dtype=torch.bfloat16, mask=None, **shape):
        call = make(**{"t": 20, "w": 40, "dv": 16, **shape}).to(dtype)
        return GRAFT_ATTENTION.choose(*call[:3], mask).name

    assert server() == "flex"
    assert server(mask=padding(2, 20, 23, [0, 4])) == "flex"
    assert server(w=16, past=0) == "sdpa"
    assert server(w=16, past=0, mask=padding(2, 20, 20, [0, 4])) == "flex"
    assert server(t=1) == "sdpa"
    assert server(w=300) == "sdpa"
    assert server(dv=300) == "sdpa"
    assert server(torch.float32) == "sdpa"
    assert server(mask=torch.zeros(2, 1, 20, 23, dtype=torch.bfloat16)) == "sdpa"
