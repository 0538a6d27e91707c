"""Laws of graft attention: bias, null key, masks, documents; and of its kernels in Triton, in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from surgery.kernels import attention_triton
from surgery.kernels.attention import ATTEND, attend
from surgery.kernels.choose import KernelError
from surgery.modeling import reference
from surgery.modeling.packing import Packing
from tests.kernels import inputs
from tests.kernels.inputs import distance, with_gradients

CASES = {
    "bias and null": {},
    "bias": {"null": None},
    "null": {"bias": None},
    "neither": {"bias": None, "null": None},
    "one bias for all heads": {"bias": 1},
    "padding on the left": {"mask": True},
    "padding without a null key": {"mask": True, "null": None, "bias": None},
}


def make(case: dict, **sizes: int) -> tuple[list, torch.Tensor | None]:
    """q, k, v, bias and null of a case, and its mask."""
    given = inputs.attention(**sizes)
    if case.get("bias") == 1:
        given["bias"] = given["bias"][:, :1]
    args = [None if name in case and case[name] is None else m for name, m in given.items()]
    mask = torch.arange(given["k"].shape[2]).expand(2, -1) >= torch.tensor([[5], [0]]) if case.get("mask") else None
    return args, mask


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("backend", ["sdpa", "plain", None])
def test_results_and_gradients_are_those_of_the_reference(case, backend):
    args, mask = make(case)
    own = with_gradients(lambda *each: attend(*each, mask, backend=backend), args)
    truths = with_gradients(lambda *each: reference.attend(*each, mask), args)
    assert all(distance(m, truth) < 1e-13 for m, truth in zip(own, truths, strict=True))


@pytest.mark.parametrize("t", [1, 20, 70])
def test_the_last_queries_see_all_keys(t):
    args, _ = make({}, t=70)
    whole, share = attend(*args)
    y, m = attend(args[0][:, :, 70 - t :], *args[1:])
    assert distance(y, whole[:, :, 70 - t :]) < 1e-13
    assert distance(m, share[:, :, 70 - t :]) < 1e-13


def test_documents_do_not_see_each_other():
    args, _ = make({})
    packing = Packing.of(torch.tensor([[0] * 20 + [1] * 50, [0] * 33 + [-1] * 4 + [1] * 33]))
    own = with_gradients(lambda *each: attend(*each, packing=packing), args)
    truths = with_gradients(lambda *each: reference.attend(*each, packing=packing), args)
    assert all(distance(m, truth) < 1e-13 for m, truth in zip(own, truths, strict=True))
    assert not own[0][1, :, 33:37].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precision(dtype):
    args = [m.to(dtype) for m in inputs.attention().values()]
    y, m = attend(*args)
    truth, share = reference.attend(*(m.double() for m in args))
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert y.dtype == dtype
    assert distance(y, truth) < bound
    assert distance(m, share) < bound
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(*pair) for pair in zip(attend(*args), (y, m), strict=True))
    last, _ = attend(*(each[:, :, -1:] if i == 0 else each for i, each in enumerate(args)))
    assert distance(last, truth[:, :, -1:]) < bound


def test_an_empty_batch_has_its_shape():
    y, m = attend(*(m[:0] if m.dim() > 1 else m for m in inputs.attention().values()))
    assert y.shape == (0, 2, 70, 20)
    assert m.shape == (0, 2, 70)


# Shared memory that a block may have, in bytes: RTX 30, 40 and 50 and A10; A100; H100 and H200.
CARDS = {"RTX 4090": 101_376, "A100": 166_912, "H100": 232_448}


@pytest.mark.parametrize("shared", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize(
    ("w", "p", "itemsize"), [(128, 64, 2), (64, 64, 2), (256, 128, 2), (16, 128, 2), (128, 64, 4), (256, 128, 4)]
)
@pytest.mark.parametrize("backward", [False, True])
def test_a_tile_fits_every_card(shared, w, p, itemsize, backward):
    queries, keys, _, stages = attention_triton.tile(w, p, itemsize, shared, backward)
    own, moving = (keys * (w + p), queries) if backward else (queries * w, keys)
    assert (own + stages * moving * (w + p)) * itemsize < shared
    if itemsize == 2 and (w, p) == (128, 64):
        assert queries >= 64, "a published graft has tiles of some size on every card"


def test_what_a_gpu_is_not_asked_for():
    args, _ = make({})
    assert ATTEND.why_not(ATTEND.backends["triton"], *args, None, None)
    assert ATTEND.choose(*args, None, None).name == "sdpa"


@pytest.mark.parametrize(("tokens", "fits"), [(500_000, True), (2_000_000, False)])
def test_triton_refuses_rows_whose_offsets_it_cannot_count(tokens, fits):
    q = torch.empty(1, tokens, 24, 64, device="meta", dtype=torch.bfloat16)
    for m in (q.transpose(1, 2), q.view(1, 24, tokens, 64)):
        assert ("offsets" not in (attention_triton.not_for_triton(m, m, m) or "")) == fits


def test_a_backend_that_is_asked_for_serves_or_none_does(monkeypatch):
    """Of packed rows sdpa takes one document at a time; they are then given to it one by one."""
    args, _ = make({})
    packed = [*args, None, torch.zeros(args[0].shape[0], args[0].shape[2], dtype=torch.int32)]
    monkeypatch.setattr(ATTEND, "reference", None)  # as if plain were a kernel
    assert not ATTEND.takes_packed(*packed, backend="sdpa")
    assert ATTEND.takes_packed(*packed)
    monkeypatch.setenv("SURGERY_KERNELS", "attend=sdpa")
    assert not ATTEND.takes_packed(*packed)
    with pytest.raises(KernelError, match="no backend named"):
        ATTEND.takes_packed(*packed, backend="dense")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (make gpu-rehearsal installs it)")
@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_triton_kernels(how):
    """In a process of its own: whether Triton interprets is decided when kernels are defined. Compiled, for cards that are not
    here, they fit each card's shared memory."""
    environment = os.environ | {"TRITON_INTERPRET": str(int(how == "interpreted")), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "gpu_rehearsal" / f"attention_{how}.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
