"""Who chooses the backend, and what happens to a wrong choice."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from surgery.kernels import dispatch
from surgery.kernels.attention import GRAFT_ATTENTION, graft_attention
from surgery.kernels.dispatch import Backend, KernelError, Operation, use
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP, ssd_scan, ssd_step
from tests.kernels.inputs import make_scan


def doubled(x):
    return 2 * x


def operation(name: str = "op", **extra: Backend) -> Operation:
    """best, middle and last, after the `extra` ones; each adds its name to its result."""
    backends = [Backend(n, lambda x, n=n: (2 * x, n)) for n in ("best", "middle", "last")]
    return Operation(
        name, *extra.values(), *backends, example=lambda device, dtype: (torch.ones(3, device=device, dtype=dtype),)
    )


def chosen(backend: str | None = None, name: str = "op") -> str:
    return operation(name)(torch.zeros(1), backend=backend)[1]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No choice in the environment, two operations more than there are, and a registry of its own."""
    monkeypatch.delenv("SURGERY_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "OPERATIONS", (*dispatch.OPERATIONS, "op", "other"))
    monkeypatch.setattr(Operation, "registry", {})
    dispatch._parse.cache_clear()


def test_argument_beats_context_beats_environment(monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", "op=last")
    assert chosen() == "last"
    with use(op="middle"):
        assert chosen() == "middle"
        assert chosen("best") == "best"
    assert chosen() == "last"


def test_contexts_nest():
    assert chosen() == "best"
    with use(op="middle", other="last"):
        with use(op="last"):
            assert chosen() == "last"
            assert chosen(name="other") == "last"  # the outer block still holds where the inner one is silent
        assert chosen() == "middle"
    assert chosen() == "best"


def test_an_error_ends_the_context():
    with pytest.raises(ZeroDivisionError), use(op="last"):
        1 / 0  # noqa: B018
    assert chosen() == "best"


def chosen_elsewhere() -> str:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(chosen).result()


def test_a_block_holds_in_threads_that_it_starts_and_in_those_that_were_there():
    with ThreadPoolExecutor(1) as earlier:
        assert earlier.submit(chosen).result() == "best"
        with use(op="middle"):
            assert earlier.submit(chosen).result() == chosen_elsewhere() == "middle"
            with use(other="last"):
                assert chosen_elsewhere() == "middle"
        assert earlier.submit(chosen).result() == chosen_elsewhere() == "best"


def test_a_thread_goes_by_its_own_blocks():
    entered, leave = threading.Event(), threading.Event()

    def work() -> list[str]:
        with use(op="last"):
            entered.set()
            leave.wait(60)
            with use(other="middle"):
                inner = chosen()
        return [inner, chosen()]

    with ThreadPoolExecutor(1) as thread:
        with use(op="middle"):
            future = thread.submit(work)
            entered.wait(60)
            assert chosen() == "middle"
            leave.set()
            assert future.result() == ["last", "middle"]
        assert chosen() == "best"


def test_blocks_may_end_in_any_order():
    blocks = [use(op=name) for name in ("middle", "last")]
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with blocks[1]:
            entered.set()
            left.wait(60)

    with ThreadPoolExecutor(1) as thread:
        with blocks[0]:
            future = thread.submit(other)
            entered.wait(60)
        assert chosen() == chosen_elsewhere() == "last"  # the one that is still open
        left.set()
        future.result()
    assert chosen() == "best"


def test_a_block_holds_in_what_a_backward_pass_computes_again():
    """In threads of autograd (as on a GPU) nothing is known of the block's thread."""
    op, names = operation(), []

    def forward(x):
        y, name = op(x)
        names.append(name)
        return y.sin()

    x = torch.ones(1, requires_grad=True)
    with use(op="middle"), ThreadPoolExecutor(1) as thread:
        thread.submit(checkpoint(forward, x, use_reentrant=False).backward).result()
    assert names == ["middle", "middle"]


def test_the_environment_names_several_operations(monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", " op = middle , other=last,")
    assert [chosen(), chosen(name="other"), chosen(name="third")] == ["middle", "last", "best"]


def test_an_unknown_operation_is_named(monkeypatch):
    with (
        pytest.raises(KernelError, match="no operation is named 'ssd_scna'; there are causal_conv, ssd_scan"),
        use(ssd_scna="stock"),
    ):
        pass
    monkeypatch.setenv("SURGERY_KERNELS", "ssd_scna=stock")
    with pytest.raises(KernelError, match="no operation is named 'ssd_scna'"):
        chosen()


@pytest.mark.parametrize("value", ["op", "op=last,other", "reference", "op="])
def test_malformed_environment(monkeypatch, value):
    monkeypatch.setenv("SURGERY_KERNELS", value)
    with pytest.raises(KernelError, match="SURGERY_KERNELS"):
        chosen()


def test_unknown_backend_wherever_it_was_asked_for(monkeypatch):
    message = "op has no backend named 'fast'; it has best, middle, last"
    with pytest.raises(KernelError, match=message):
        chosen("fast")
    with pytest.raises(KernelError, match=message), use(op="fast"):
        chosen()
    monkeypatch.setenv("SURGERY_KERNELS", "op=fast")
    with pytest.raises(KernelError, match=message):
        chosen()


def test_a_backend_that_refuses_is_passed_over_but_not_when_it_was_asked_for():
    picky = Backend("picky", lambda x: (2 * x, "picky"), refuses=lambda x: "too short" if len(x) < 2 else None)
    op = operation(picky=picky)
    assert op(torch.zeros(1))[1] == "best"
    assert op(torch.zeros(2))[1] == "picky"
    with pytest.raises(KernelError, match="op: the backend 'picky' was asked for and cannot serve: too short"):
        op(torch.zeros(1), backend="picky")


def broken(_):
    raise ImportError("undefined symbol:\n_ZN3c10")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (broken, "ImportError: undefined symbol: _ZN3c10"),
        (lambda x: 3 * x, "its result is wrong: off by 0.5 "),
        (lambda x: x * torch.nan, "its result is wrong: off by nan "),
        (lambda x: x[:2], r"its result has the shape \(2,\) where \(3,\) belongs"),
    ],
)
def test_a_probed_backend_serves_only_if_a_small_call_is_right(run, reason):
    calls = []

    def counted(x):
        calls.append(x)
        return run(x)

    def make(foreign):
        return Operation("op", Backend("foreign", foreign, probed=True), Backend("reference", doubled), example=example)

    def example(device, dtype):
        return (torch.ones(3, device=device, dtype=dtype),)

    op = make(counted)
    for _ in range(2):
        assert torch.equal(op(torch.ones(5)), torch.full([5], 2.0))
    assert len(calls) == 1  # the probe, once
    with pytest.raises(KernelError, match=f"'foreign' was asked for and cannot serve: {reason}"):
        op(torch.ones(5), backend="foreign")
    assert make(doubled).choose(torch.ones(5)).name == "foreign"


def test_operations_listen_to_their_own_names(monkeypatch):
    """The scan's name in `use` is the function's name: asked for a backend that refuses, each says so, and only it."""
    x, dt, A, B, C, D, state = make_scan(1)
    q = torch.zeros(1, 1, 1, 1)
    calls = {
        SSD_SCAN: lambda: ssd_scan(x, dt, A, B, C),
        SSD_STEP: lambda: ssd_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D),
        GRAFT_ATTENTION: lambda: graft_attention(q, q, q),
    }
    for operation in calls:
        refusing = Backend("refusing", doubled, refuses=lambda *args: "it never does")
        monkeypatch.setitem(operation.backends, "refusing", refusing)
    for asked in calls:
        with use(**{asked.name: "refusing"}):
            for operation, call in calls.items():
                if operation is asked:
                    with pytest.raises(KernelError, match=f"{operation.name}: .* it never does"):
                        call()
                else:
                    call()


def test_a_backend_that_declines_or_waits_to_be_asked_serves_by_its_name():
    modest = Backend("modest", lambda x: (x, "modest"), declines=lambda x: "too short" if len(x) < 2 else None)
    op = operation(shy=Backend("shy", lambda x: (x, "shy"), on_request=True), modest=modest)
    assert op(torch.ones(2))[1] == "modest"
    assert op(torch.ones(1))[1] == "best"
    assert op(torch.ones(1), backend="modest")[1] == "modest"
    assert op(torch.ones(1), backend="shy")[1] == "shy"
