"""A backend is chosen by what it can do here, for a kind of call."""

import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import hub_kernels

from surgery.kernels import conv, selective, ssd
from surgery.kernels.choose import Backend, KernelError, Operation
from surgery.kernels.conv import CAUSAL_CONV, _by_cuda
from surgery.kernels.explain import SMALL, make_calls
from surgery.kernels.ssd import SSD_SCAN, ssd_scan
from tests.kernels import inputs
from tests.kernels.inputs import distance, randn, with_gradients


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def make(run, **options) -> Operation:
    """An operation with a backend `first` that may fail, and one that serves."""
    first = Backend("first", run, probed=True, by_size=True, **options)
    name = f"twice_{os.urandom(4).hex()}"
    operation = Operation(name, "x:btc", lambda x: [(x.shape, x.dtype)], 1, first, Backend("last", twice))
    del Operation.registry[name]
    return operation


def fails_where(condition):
    def run(x):
        if condition(x):
            raise RuntimeError("out of resource: shared memory, Required: 139776, Hardware limit: 101376")
        return x * 2

    return run


class BackwardFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError("No valid triton configs")


def test_it_is_tried_at_the_width_of_the_call():
    operation = make(fails_where(lambda x: x.shape[2] > 128))
    assert operation.choose(randn(3, 100, 128)).name == "first"
    with pytest.warns(UserWarning, match="first"):
        assert operation.choose(randn(3, 100, 129)).name == "last"
    assert operation.choose(randn(1, 7, 129)).name == "last"
    assert operation.choose(randn(3, 100, 128)).name == "first"


def test_it_is_tried_with_gradients_where_they_are_needed():
    operation = make(BackwardFails.apply)
    assert operation.choose(randn(2, 9, 8)).name == "first"
    with pytest.warns(UserWarning, match="first"):
        assert operation.choose(randn(2, 9, 8).requires_grad_()).name == "last"


def test_a_wrong_one_does_not_serve():
    operation = make(lambda x: x * 2.1)
    with pytest.warns(UserWarning, match="first"):
        assert distance(operation(x := randn(2, 9, 8)), x * 2) == 0


def test_what_fails_at_a_real_call_is_refused_once_and_the_next_serves():
    calls = []

    def run(x):
        calls.append(x.shape)
        if x.shape[1] > 80:  # no example is so long
            raise RuntimeError("an illegal memory access")
        return x * 2

    operation = make(run)
    x = randn(2, 90, 8)
    with pytest.warns(UserWarning, match="first"):
        assert distance(operation(x), x * 2) == 0
    tried = len(calls)
    operation(x)
    assert len(calls) == tried


def test_too_little_memory_is_no_fault_of_a_backend():
    def run(x):
        if x.shape[1] > 80:
            raise torch.OutOfMemoryError("out of memory")
        return x * 2

    operation = make(run)
    with pytest.raises(torch.OutOfMemoryError):
        operation(randn(2, 90, 8))
    assert operation.choose(randn(2, 90, 8)).name == "first"


def test_a_mode_of_the_caller_does_not_reach_the_trial():
    operation = make(lambda x: x @ x.mT @ x * 0 + x * 2)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert operation.choose(randn(2, 9, 8)).name == "first"


def test_one_that_was_asked_for_serves_or_says_why(monkeypatch):
    args = inputs.ssd()[:6]
    with pytest.raises(KernelError, match="mamba_ssm"):
        ssd_scan(*args, backend="mamba_ssm")
    monkeypatch.setenv("SURGERY_KERNELS", "ssd_scan=nothing")
    with pytest.raises(KernelError, match="nothing"):
        ssd_scan(*args)
    monkeypatch.setenv("SURGERY_KERNELS", "ssd_stp=torch")
    with pytest.raises(KernelError, match="no operation 'ssd_stp'"):
        ssd_scan(*args)
    monkeypatch.setenv("SURGERY_KERNELS", "ssd_scan=chunked")
    y, _ = ssd_scan(*args)
    assert distance(y, ssd_scan(*args, backend="native")[0]) < 2e-6


def test_nothing_is_downloaded_unless_it_is_asked_for():
    assert all(backend.on_request for backend in SSD_SCAN.backends.values() if backend.name == "hub")
    assert SSD_SCAN.choose(*inputs.ssd()[:6], None, None, 256).name == "native"


def test_kernels_of_the_hub_are_those_of_transformers(monkeypatch):
    mapped = re.findall(r'repo_id="kernels-community/(.+?)",[^)]+?version=(\d+)', Path(hub_kernels.__file__).read_text())
    asked = []

    def find(name: str, version: int) -> Any:
        asked.append((name, str(version)))
        raise LookupError(name)

    for module in (ssd, selective, conv):
        monkeypatch.setattr(module, "hub", find)
    calls = [each for each in make_calls(torch.device("cpu"), torch.float32, SMALL) if "hub" in each[1].backends]
    for _, operation, args in calls:
        with pytest.raises(LookupError):
            operation.backends["hub"].run(*args)
    assert len(asked) == len(calls) > 6
    assert {*asked} <= {*mapped}


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, activation=None):
    """With the checks of causal_conv1d's C++ (csrc/causal_conv1d.cpp, causal_conv1d_fwd)."""
    channels_last = x.stride(1) == 1 and x.stride(2) > 1
    if channels_last:
        assert x.shape[1] % 8 == 0, "channel dimension divisible by 8"
        assert x.stride(2) % 8 == 0, "strides multiples of 8"
        assert x.stride(0) % 8 == 0, "strides multiples of 8"
    assert weight.shape == (x.shape[1], weight.shape[1])
    assert 2 <= weight.shape[1] <= 4
    assert seq_idx is None or (channels_last and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    return CAUSAL_CONV.reference.run(
        x.transpose(1, 2), weight[:, None], bias, seq_idx, x.shape[2], activation == "silu"
    ).transpose(1, 2)


@pytest.mark.parametrize("width", [1676, 3352, 10576])
@pytest.mark.parametrize("documents", [False, True])
def test_causal_conv1d_takes_a_part_of_any_projection(width, documents):
    """1676 is tiny-books', the others are published widths of in_proj."""
    whole, weight, bias = randn(2, 30, width), randn(832, 1, 4), randn(832)
    seq_idx = (torch.arange(30) > 11).int().expand(2, -1).contiguous() if documents else None
    own, truths = (
        with_gradients(lambda x, *rest: run(x[..., width - 840 : width - 8], *rest, seq_idx, 30, True), [whole, weight, bias])  # noqa: B023
        for run in (partial(_by_cuda, lambda: causal_conv1d_fn), CAUSAL_CONV.reference.run)
    )
    assert all(distance(m, truth) < 1e-6 for m, truth in zip(own, truths, strict=True))


@pytest.mark.parametrize("small", [False, True])
def test_an_example_of_every_kind_of_call_can_be_computed(small):
    for _, operation, args in make_calls(torch.device("cpu"), torch.float64, SMALL):
        example = operation.example(args, small=small)
        operation.reference.run(*example)
        assert [type(m) for m in example] == [type(m) for m in args]


@pytest.mark.skipif(find_spec("triton") is None or find_spec("mamba_ssm") is None, reason="make gpu-rehearsal installs them")
def test_mamba_ssm_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    script = Path(__file__).parents[1] / "gpu_rehearsal" / "mamba_ssm_interpreted.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
