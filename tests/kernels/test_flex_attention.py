"""flex_attention against the loop in float64, where it runs without a GPU, and where it would serve on one."""

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


def check(dtype, mask, **shape):
    """mask: of no keys, of keys, or of pairs. Each call is compiled anew, in about a second."""
    call = make(**{"w": 129, "dv": 64, "past": 7, "pairs": 2, **shape}).to(dtype)
    t, s = call.q.shape[2], call.k.shape[2]
    pairs = None if call.mask is None else padding(2, t, s, [0]) & call.mask[:, None, None]
    truth = loop(*(m.double() for m in call[:3]), pairs)
    given = {"none": None, "keys": call.mask, "pairs": pairs}[mask]
    assert_near(graft_attention(*call[:3], given, backend="flex"), truth, 1e-5 if dtype == torch.float32 else 1e-2, floor=1)


@pytest.mark.parametrize("t", [1, 20])
def test_equals_a_loop(t):
    """Queries at the end of the keys; keys that are missing, and rows that see nothing; masks of pairs."""
    check(torch.float32, "none", t=t)
    for mask in ("keys", "pairs"):
        check(torch.float32, mask, t=t, missing=0.3, left=12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_several_blocks(dtype):
    check(dtype, "keys", t=140, w=17, dv=200, missing=0.3, left=5)


def test_without_a_gpu_it_serves_by_name_and_forward():
    call = make(t=20)
    assert GRAFT_ATTENTION.choose(*call).name != "flex"
    with pytest.raises(KernelError, match="no backward pass"):
        graft_attention(call.q.requires_grad_(), call.k, call.v, backend="flex")
    with pytest.raises(KernelError, match="boolean masks"):
        graft_attention(*make(t=3, past=0)[:3], torch.zeros(2, 1, 3, 3), backend="flex")


def test_where_it_serves_on_a_gpu(monkeypatch):
    """What torch's kernels would store the scores of, and what none of the others takes."""
    monkeypatch.setattr(flex_attention, "on_gpu", lambda _: True)
    monkeypatch.setattr(flex_attention, "_compiled", flex_attention._flex)
    monkeypatch.setattr(probing, "_outcomes", {})

    def serves(dtype=torch.bfloat16, mask=None, **shape):
        call = make(**{"t": 20, "w": 40, "dv": 16, **shape}).to(dtype)
        return GRAFT_ATTENTION.choose(*call[:3], mask).name == "flex"

    assert serves()
    assert serves(mask=padding(2, 20, 23, [0, 4]))
    assert not serves(w=16, past=0)
    assert serves(w=16, past=0, mask=padding(2, 20, 20, [0, 4]))
    assert not serves(t=1)
    assert not serves(w=300)
    assert not serves(dv=300)
    assert not serves(torch.float32)
    assert not serves(mask=torch.zeros(2, 1, 20, 23, dtype=torch.bfloat16))
