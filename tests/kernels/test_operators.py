"""The operations as operators of torch.library: shapes without computing, gradients, and who chooses what serves."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from surgery.kernels import operators
from surgery.kernels.dispatch import OPERATIONS, use
from surgery.kernels.operations import operations
from surgery.kernels.ssd import SSD_SCAN, ssd_scan
from surgery.kernels.ssd_native import SPAN
from surgery.kernels.ssd_native import scan as native_scan
from tests.kernels.inputs import make_scan

CPU = torch.device("cpu")
LEARNING = [name for name in OPERATIONS if not name.endswith("step") and name != "kl_divergence"]
# Beside what serves here: a backend whose gradient computes the forward pass again.
AGAIN = {
    "ssd_scan": "chunked", "selective_scan": "chunked", "delta_rule": "stock", "graft_attention": "reference",
    "causal_conv": "stock",
}  # fmt: skip


def arguments(name, dtype=torch.float32, needed=None):
    """The example of an operation, whose tensors learn, or the first `needed` of them."""
    args = [m.detach().clone() if isinstance(m, torch.Tensor) else m for m in operations()[name].example(CPU, dtype)]
    for m in [m for m in args if isinstance(m, torch.Tensor)][:needed]:
        m.requires_grad_(name in LEARNING)
    return args


def serving(name, dtype=torch.float32) -> str:
    return operations()[name].choose(*arguments(name, dtype)).name


def tuple_of(results):
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def check(name, backend, **options):
    operator = operations()[name].operator
    torch.library.opcheck(operator.forward, (*arguments(name), *[name in LEARNING] * operator.learns, backend), **options)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operator_is_sound(name):
    """Its schema, its shapes and its gradient."""
    check(name, serving(name), test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("name", ["ssd_scan", "ssd_step"])
def test_an_operator_is_traced(name):
    """A trace of both passes with changing sizes computes the same."""
    check(name, serving(name), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operator_is_traced(name):
    for backend in {serving(name), AGAIN.get(name, serving(name))}:
        check(name, backend)


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needed", [None, 1])
def test_an_operator_computes_what_its_backend_computes(name, dtype, needed):
    """Bit for bit, forward and backward, whether all arguments learn or the first alone."""
    operation = operations()[name]
    for backend in {serving(name, dtype), AGAIN.get(name, serving(name, dtype))}:
        results, gradients = [], []
        for run in (operation.backends[backend].run, lambda *args: operation.operator(*args, backend=backend)):  # noqa: B023
            args = arguments(name, dtype, needed)
            results.append(tuple_of(run(*args)))
            learning = [m for m in args if isinstance(m, torch.Tensor) and m.requires_grad]
            g = torch.Generator().manual_seed(0)
            weights = [torch.randn(m.shape, generator=g).to(m.dtype) for m in results[-1]]
            gradients.append(torch.autograd.grad(results[-1], learning, weights))
        for first, second in zip(results[0] + gradients[0], results[1] + gradients[1], strict=True):
            assert first.dtype == second.dtype
            assert torch.equal(first, second)


@pytest.mark.parametrize("length", [1, SPAN - 1, SPAN, SPAN + 1, 3 * SPAN + 7])
def test_what_the_scan_keeps_has_the_size_that_a_trace_is_told(length):
    scan = (*make_scan(length, groups=2, per_group=3, width=9, size=7), 256)
    if serving("ssd_scan") != "native":
        pytest.skip("there is no compiler")
    shape, dtype = native_scan.kept(*scan)
    kept = native_scan.forward(*scan, keep=True)[-1]
    assert (tuple(kept.shape), kept.dtype) == (tuple(shape), dtype)


@pytest.mark.parametrize("name", OPERATIONS)
def test_tensors_without_memory_are_taken(name):
    """Through the operation's own call; what comes back has the shapes and dtypes of what is computed."""
    real = tuple_of(operations()[name](*arguments(name)))
    args = arguments(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = tuple_of(operations()[name](*(mode.from_tensor(m) if isinstance(m, torch.Tensor) else m for m in args)))
        of_values = tuple_of(operations()[name](*args))  # tensors that are there, results that are not
    for found in (fake, of_values):
        assert [(m.shape, m.dtype) for m in found] == [(m.shape, m.dtype) for m in real]


def test_a_trace_carries_its_choice_into_other_threads():
    """A thread goes by the choice at the time of the trace, not by its own nor by today's."""
    x, dt, A, B, C, *_ = make_scan(9)
    with use(ssd_scan="chunked"):
        traced = make_fx(lambda x, dt: ssd_scan(x, dt, A, B, C)[0])(x, dt)
    (call,) = [node for node in traced.graph.nodes if node.target is SSD_SCAN.operator.forward]
    assert call.args[-1] == "chunked"
    expected = ssd_scan(x, dt, A, B, C, backend="chunked")[0]
    with ThreadPoolExecutor(1) as pool, use(ssd_scan="reference"):
        assert torch.equal(pool.submit(traced, x, dt).result(), expected)


def test_plain_calls_take_no_detour(monkeypatch):
    """An operator costs more than a small model's kernel."""
    for operation in operations().values():
        monkeypatch.setattr(operation, "operator", None)
    for name in OPERATIONS:
        operations()[name](*arguments(name))


def test_copies_of_the_code_have_operators_of_their_own():
    """Exported folders bring their own, also two of one name."""
    assert operators.LIBRARY.ns == "surgery"
    copies = []  # all kept: a copy that nobody holds any more gives its namespace back
    for name in ("some_folder.operators", "some_folder.operators", "other_folder.operators"):
        spec = importlib.util.spec_from_file_location(name, operators.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        copies.append(module)
    spaces = {module.LIBRARY.ns for module in copies}
    assert len(spaces) == 3
    assert "surgery" not in spaces
