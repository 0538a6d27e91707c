"""What is found out about a backend: by its gradients, too, whatever surrounds the first call, and not for good where it failed
in passing."""

import errno
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from surgery.kernels import native, probing
from surgery.kernels.dispatch import Backend, KernelError, Operation
from surgery.kernels.operations import operations


@pytest.fixture(autouse=True)
def _nothing_known():
    probing.forget()
    yield
    probing.forget()


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(Operation, "registry", {})


def example(device, dtype):
    return (torch.linspace(1, 2, 50, dtype=torch.float32).to(device, dtype),)


def operation(run, **options) -> Operation:
    backends = Backend("foreign", run, probed=True), Backend("reference", torch.sin)
    return Operation("op", *backends, example=example, **options)


class WrongGradient(torch.autograd.Function):
    """sin, with a gradient of which one number of 50 is left out."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = dy * x.cos()
        dx[7] = 0
        return dx


@pytest.mark.usefixtures("registry")
def test_a_wrong_gradient_is_found_and_keeps_no_call_without_one():
    op = operation(WrongGradient.apply)
    x = torch.ones(3)
    assert op.choose(x).name == "foreign"
    assert op.choose(x.requires_grad_()).name == "reference"
    with torch.no_grad():
        assert op.choose(x).name == "foreign"
    with pytest.raises(KernelError, match="its gradient is wrong: off by "):
        op(x, backend="foreign")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("run", [lambda x: x.detach().sin(), lambda x: torch.sin(x).clone().detach()])
def test_a_lost_gradient_is_found(run):
    op = operation(run)
    assert op.choose(torch.ones(3)).name == "foreign"
    assert op.choose(torch.ones(3, requires_grad=True)).name == "reference"


def left_out(x):
    y = x.sin()
    y[49] = 0
    return y


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("run", "reason"), [(left_out, "its result is wrong: off by"), (torch.sin_, "its effect on its arguments is wrong: off by")]
)
def test_one_wrong_number_is_found(run, reason):
    """Also among many: the norm of all hardly changes."""
    op = operation(run, differentiable=False)
    assert reason in op.why_not(op.backends["foreign"], torch.ones(3))


@contextmanager
def default(what: str, value: object) -> Iterator[None]:
    """torch's default device or dtype."""
    before = None if what == "device" else torch.get_default_dtype()  # a device that is set, the default's too, is a mode
    getattr(torch, f"set_default_{what}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_default_{what}")(before)


def refuse(*_):
    raise AssertionError("a hook of the caller's")


CONTEXTS = {
    "meta": partial(torch.device, "meta"),
    "default device": partial(default, "device", "meta"),
    "default dtype": partial(default, "dtype", torch.float64),
    "default half": partial(default, "dtype", torch.float16),
    "inference": torch.inference_mode,
    "no gradient": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "hooks": partial(saved_tensors_hooks, refuse, refuse),
    "anomaly": partial(torch.autograd.set_detect_anomaly, True),
    "fake": partial(FakeTensorMode, allow_non_fake_inputs=True),
}
OPERATIONS = [name for name, operation in operations().items() if "native" in operation.backends]


@pytest.mark.parametrize(
    ("context", "name"),
    [*((context, OPERATIONS[0]) for context in CONTEXTS), *(("default half", name) for name in OPERATIONS[1:])],
)
def test_the_first_call_s_context_does_not_matter(context, name):
    op = operations()[name]
    if reason := op.why_not(op.backends["native"], *op.example(torch.device("cpu"), torch.float32)):
        pytest.skip(reason)
    for learning in (False, op.differentiable):
        args = op.example(torch.device("cpu"), torch.float32)
        args = [m.requires_grad_(learning) if isinstance(m, torch.Tensor) else m for m in args]
        probing.forget()
        with CONTEXTS[context]():
            inside = op.choose(*args).name
        assert inside == "native" or context == "fake"
        assert all(outcome == probing.ProbeOutcome(None) for outcome in probing._outcomes.values())
        assert op.choose(*args).name == "native"


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_first_call_within_a_transform_does_not_matter(name):
    op = operations()[name]
    args = op.example(torch.device("cpu"), torch.float32)
    if reason := op.why_not(op.backends["native"], *args):
        pytest.skip(reason)
    probing.forget()
    torch.func.vmap(lambda x: op.choose(*args) and x)(torch.ones(2))
    torch.func.grad(lambda x: op.choose(*args) and x)(torch.ones(()))
    assert op.choose(*args).name == "native"
    assert all(outcome.reason is None for outcome in probing._outcomes.values())


@pytest.mark.usefixtures("registry")
def test_the_first_of_several_threads_finds_out():
    calls, gate = [], threading.Barrier(4)

    def run(x):
        calls.append(x)
        return x.sin()

    op = operation(run)

    def ask(_):
        gate.wait(60)
        return op.choose(torch.ones(3)).name

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {"foreign"}
    assert len(calls) == 1


class Unlucky:
    """sin, after some failures."""

    def __init__(self, *failures: Exception):
        self.failures, self.calls = list(failures), 0

    def __call__(self, x):
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return x.sin()


PASSED = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EAGAIN, "Resource temporarily unavailable"),
    MemoryError("no memory for a kernel's workspace"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("the C compiler 'cc' fails: gcc: fatal error: Killed signal terminated program cc1"),
    RuntimeError("can't start new thread"),
    native.PassingError("the C compiler 'cc' takes more than 300 s"),
]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("failure", PASSED, ids=lambda failure: str(failure)[:30])
def test_what_failed_in_passing_is_tried_again_later(failure, monkeypatch):
    run = Unlucky(failure)
    op, now = operation(run), 1000.0
    monkeypatch.setattr(probing.time, "monotonic", lambda: now)
    for _ in range(3):
        assert op.choose(torch.ones(3)).name == "reference"
    assert run.calls == 1
    now += probing.AGAIN
    assert op.choose(torch.ones(3)).name == "foreign"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("failure", [ImportError("undefined symbol"), OSError(errno.ENOENT, "no such file"), SystemExit(1)])
def test_what_failed_for_a_reason_is_not_tried_again(failure, monkeypatch):
    run = Unlucky(failure)
    op, now = operation(run), 1000.0
    monkeypatch.setattr(probing.time, "monotonic", lambda: now)
    assert op.choose(torch.ones(3)).name == "reference"
    now += 1000 * probing.AGAIN
    assert op.choose(torch.ones(3)).name == "reference"
    assert run.calls == 1


@pytest.mark.usefixtures("registry")
def test_no_thread_to_be_had_is_a_passing_failure(monkeypatch):
    op = operation(torch.sin)

    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(probing.Thread, "start", start)
        assert op.choose(torch.ones(3)).name == "reference"
    assert probing._outcomes[next(iter(probing._outcomes))].again is not None
    monkeypatch.setattr(probing, "AGAIN", 0.0)
    probing.forget()
    assert op.choose(torch.ones(3)).name == "foreign"


@pytest.mark.usefixtures("registry")
def test_a_backward_pass_ends_with_the_backend_that_it_began_with(monkeypatch):
    """Another backend would store other tensors, which checkpointing refuses."""
    monkeypatch.setattr(probing, "AGAIN", 0.0)  # tried again at every call, where that is allowed
    op, names = operation(Unlucky(MemoryError(), MemoryError())), []

    def forward(x):
        names.append(op.choose(x).name)
        return op(x)

    x = torch.linspace(1, 2, 3).requires_grad_()
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert names == ["reference", "reference"]
    assert torch.allclose(x.grad, x.detach().cos())
    assert [op.choose(x).name for _ in range(2)] == ["reference", "foreign"]  # between two passes it is tried again


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.usefixtures("registry")
def test_a_forked_process_does_not_wait_for_a_thread_that_stayed_behind():
    op, x = operation(torch.sin), torch.ones(3)
    key = (op, op.backends["foreign"], x.device, x.dtype, False)
    with probing._locks.setdefault(key, threading.Lock()):
        if not (child := os.fork()):
            signal.alarm(300)  # it hangs
            os._exit(0 if op.choose(x).name == "foreign" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
