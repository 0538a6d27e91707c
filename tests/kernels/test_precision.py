"""What runs around a kernel changes no gradient of it: autocast, torch.func, forward-mode derivatives, FakeTensorMode."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from surgery.kernels import probing
from surgery.kernels.attention import GRAFT_ATTENTION
from surgery.kernels.conv import CAUSAL_CONV
from surgery.kernels.dispatch import Operation
from surgery.kernels.norm import RMS_NORM
from surgery.kernels.selective import SELECTIVE_SCAN
from surgery.kernels.ssd import SSD_SCAN

LEARNT = (CAUSAL_CONV, SSD_SCAN, SELECTIVE_SCAN, RMS_NORM, GRAFT_ATTENTION)
BACKENDS = [(operation, name) for operation in LEARNT for name in operation.backends]
BY_HAND = ("native", "chunked")  # their gradients are written out, so autocast changes nothing
HALF = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def example(operation: Operation, dtype: torch.dtype) -> tuple:
    """Arguments in float64 that are numbers of `dtype`, as the operation's own example."""
    return tuple(m.to(dtype).double() if isinstance(m, Tensor) else m for m in operation.example(CPU, torch.float32))


def run(operation: Operation, args: tuple, backend: str | None = None) -> tuple[Tensor, ...]:
    results = operation(*args, backend=backend)
    return results if isinstance(results, tuple) else (results,)


def gradients(
    operation: Operation, args: tuple, backend: str, forward: bool = False, backward: bool = False, to: torch.dtype = HALF[0]
) -> list[Tensor]:
    """Of a random linear function of the results, by every tensor. forward, backward: in which pass autocast is on, to what."""
    leaves = [m for m in args if isinstance(m, Tensor)]
    for m in leaves:
        m.requires_grad_()
    with torch.autocast("cpu", to, enabled=forward):
        results = run(operation, args, backend)
    g = torch.Generator().manual_seed(0)
    loss = sum((m.double() * torch.randn(m.shape, generator=g)).sum() for m in results)
    with torch.autocast("cpu", to, enabled=backward):
        return list(torch.autograd.grad(loss, leaves))


def error(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(((a.double() - e).norm() / e.norm()).item() for a, e in zip(actual, exact, strict=True))


@pytest.mark.parametrize(
    ("passes", "dtype"),
    [((True, False), torch.float32), ((False, True), torch.float32), ((True, True), HALF[0]), ((True, True), HALF[1])],
    ids=["forward", "backward", "both, bfloat16", "both, float16"],
)
@pytest.mark.parametrize(("operation", "backend"), BACKENDS, ids=[f"{operation.name}-{name}" for operation, name in BACKENDS])
def test_autocast_in_one_pass_alone(operation, backend, passes, dtype):
    args = example(operation, dtype)
    exact = gradients(operation, args, "reference")
    narrow = tuple(m.detach().to(dtype).requires_grad_() if isinstance(m, Tensor) else m for m in args)
    if reason := operation.why_not(operation.backends[backend], *narrow, by_name=True):
        pytest.skip(f"{backend} cannot serve here: {reason}")
    to = torch.float16 if dtype == torch.float16 and backend not in BY_HAND else torch.bfloat16  # torch's own take no other
    actual = gradients(operation, narrow, backend, *passes, to)
    assert [m.dtype for m in actual] == [m.dtype for m in narrow if isinstance(m, Tensor)]
    # Gradients of parameters are sums over all tokens; the plain recurrences round the state to bfloat16 at every one of them.
    bound = 1e-5 if dtype == torch.float32 and backend in BY_HAND else 2e-2 if backend in BY_HAND else 6e-2
    assert error(actual, exact) < bound


def loss(operation: Operation, args: tuple, backend: str | None = None) -> Callable[..., Tensor]:
    def of(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        results = run(operation, tuple(next(given) if isinstance(m, Tensor) else m for m in args), backend)
        return sum((m.square()).sum() for m in results)

    return of


@pytest.mark.parametrize("operation", LEARNT, ids=lambda operation: operation.name)
def test_torch_func(operation):
    """grad, vmap of it, and jvp, as whoever can take them computes them; nothing was probed before."""
    probing.forget()
    args = operation.example(CPU, torch.float32)
    tensors = [m for m in args if isinstance(m, Tensor)]
    exact_args = tuple(m.double() if isinstance(m, Tensor) else m for m in args)
    doubles = [m for m in exact_args if isinstance(m, Tensor)]
    places = tuple(range(len(tensors)))
    leaves = [m.clone().requires_grad_() for m in doubles]
    exact = torch.autograd.grad(loss(operation, exact_args, "reference")(*leaves), leaves)
    grad = torch.func.grad(loss(operation, args), argnums=places)
    assert error(grad(*tensors), exact) < 1e-4
    twice = torch.func.vmap(grad)(*(torch.stack([m, 2 * m]) for m in tensors))
    assert error([m[0] for m in twice], exact) < 1e-4
    _, tangent = torch.func.jvp(loss(operation, args), tuple(tensors), tuple(torch.ones_like(m) for m in tensors))
    assert tangent.item() == pytest.approx(sum(m.sum().item() for m in exact), rel=1e-3)
    # What found out meanwhile who can serve was not misled by it.
    assert operation.choose(*args).name == operation.choose(*operation.example(CPU, torch.float32)).name
    for backend in operation.backends.values():
        if not backend.on_request and operation.why_not(backend, *args) is None:
            assert error(run(operation, args, backend.name), run(operation, exact_args, "reference")) < 1e-3


@pytest.mark.parametrize("operation", LEARNT, ids=lambda operation: operation.name)
def test_a_forward_mode_derivative_is_not_lost(operation):
    args = operation.example(CPU, torch.float32)
    tensors = [m for m in args if isinstance(m, Tensor)]
    leaves = [m.double().requires_grad_() for m in tensors]
    exact_args = tuple(m.double() if isinstance(m, Tensor) else m for m in args)
    exact = torch.autograd.grad(loss(operation, exact_args, "reference")(*leaves), leaves)
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(m, torch.ones_like(m)) for m in tensors]
        tangent = forward_ad.unpack_dual(loss(operation, args)(*duals)).tangent
    assert tangent is not None
    assert tangent.item() == pytest.approx(sum(m.sum().item() for m in exact), rel=1e-3)


@pytest.mark.parametrize("operation", [SSD_SCAN, SELECTIVE_SCAN], ids=lambda operation: operation.name)
def test_a_sum_beyond_float16_is_no_infinity(operation):
    args = list(operation.example(CPU, torch.float32))
    args[0] = args[0] * 1e5 / args[0].abs().max() / 2  # within float16
    args[3], args[4] = args[3] * 10, args[4] * 10
    exact = run(operation, tuple(m.double() if isinstance(m, Tensor) else m for m in args), "reference")[0]
    assert exact.abs().max() > 1e5
    half = tuple(m.half() if isinstance(m, Tensor) and m.dim() > 2 else m for m in args)
    for backend in BY_HAND:
        if operation.why_not(operation.backends[backend], *half) is None:
            y = run(operation, half, backend)[0]
            assert error([y], [exact]) < 1e-2
