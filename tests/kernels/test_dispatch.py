"""Who chooses the backend, and what happens to a wrong choice."""

import pytest
import torch

from surgery.kernels import dispatch
from surgery.kernels.attention import graft_attention
from surgery.kernels.dispatch import choose, use
from surgery.kernels.ssd import ssd_scan, ssd_step
from tests.kernels.inputs import make_scan

BACKENDS = {name: (lambda name=name: name) for name in ("best", "middle", "last")}


def chosen(backend: str | None = None, operation: str = "op") -> str:
    return choose(operation, BACKENDS, torch.zeros(1), backend)()


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No choice in the environment, and two operations more than there are."""
    monkeypatch.delenv("SURGERY_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "OPERATIONS", (*dispatch.OPERATIONS, "op", "other"))


def test_the_first_backend_serves_by_default():
    assert chosen() == "best"


def test_argument_beats_context_beats_environment(monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", "op=last")
    assert chosen() == "last"
    with use(op="middle"):
        assert chosen() == "middle"
        assert chosen("best") == "best"
    assert chosen() == "last"


def test_contexts_nest():
    with use(op="middle", other="last"):
        with use(op="last"):
            assert chosen() == "last"
            assert chosen(operation="other") == "last"  # the outer block still holds where the inner one is silent
        assert chosen() == "middle"
    assert chosen() == "best"


def test_an_error_ends_the_context():
    with pytest.raises(ZeroDivisionError), use(op="last"):
        1 / 0  # noqa: B018
    assert chosen() == "best"


def test_the_environment_names_several_operations(monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", " op = middle , other=last,")
    assert [chosen(), chosen(operation="other"), chosen(operation="third")] == ["middle", "last", "best"]


def test_an_unknown_operation_is_named(monkeypatch):
    with pytest.raises(ValueError, match="no operation is named 'ssd_scna'; there are ssd_scan"), use(ssd_scna="stock"):
        pass
    monkeypatch.setenv("SURGERY_KERNELS", "ssd_scna=stock")
    with pytest.raises(ValueError, match="no operation is named 'ssd_scna'"):
        chosen()


@pytest.mark.parametrize("value", ["op", "op=last,other", "reference", "op="])
def test_malformed_environment(monkeypatch, value):
    monkeypatch.setenv("SURGERY_KERNELS", value)
    with pytest.raises(ValueError, match="SURGERY_KERNELS"):
        chosen()


def test_unknown_backend_wherever_it_was_asked_for(monkeypatch):
    message = "op has no backend named 'fast'; it has best, middle, last"
    with pytest.raises(ValueError, match=message):
        chosen("fast")
    with pytest.raises(ValueError, match=message), use(op="fast"):
        chosen()
    monkeypatch.setenv("SURGERY_KERNELS", "op=fast")
    with pytest.raises(ValueError, match=message):
        chosen()


def test_every_operation_names_its_backends():
    x, dt, A, B, C, D, state = make_scan(1)
    with pytest.raises(ValueError, match=r"ssd_scan .*'fast'; it has chunked, stock, reference"):
        ssd_scan(x, dt, A, B, C, backend="fast")
    with pytest.raises(ValueError, match=r"ssd_step .*'fast'; it has torch, stock"):
        ssd_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, backend="fast")
    q = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"graft_attention .*'fast'; it has sdpa, reference"):
        graft_attention(q, q, q, backend="fast")


def test_operations_listen_to_their_own_names():
    """The scan's name in `use` is the function's name: asked for nonsense, each refuses, and only it."""
    x, dt, A, B, C, D, state = make_scan(1)
    q = torch.zeros(1, 1, 1, 1)
    calls = {
        "ssd_scan": lambda: ssd_scan(x, dt, A, B, C),
        "ssd_step": lambda: ssd_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D),
        "graft_attention": lambda: graft_attention(q, q, q),
    }
    for asked in calls:
        with use(**{asked: "nonsense"}):
            for operation, call in calls.items():
                if operation == asked:
                    with pytest.raises(ValueError, match=operation):
                        call()
                else:
                    call()
