"""Which implementation serves an operation.

Every operation lists its backends in order of preference, and the first one that can take a call serves it. Another is asked
for by the call's `backend` argument, inside `with use(ssd_scan="stock"):` (or for a whole run, by a recipe's `kernels`), or by
the environment variable SURGERY_KERNELS ("ssd_scan=stock,graft_attention=reference"), in this order. A backend that was asked
for and cannot serve is an error, never a silent fallback.

Whether a backend can serve is decided by the call itself (device, dtype, shapes) and, where it needs software that may be
missing or broken (a GPU package built for another torch imports well and fails later; a compiler may be absent), by one small
real call that is compared with the reference. `surgery doctor` prints the outcome.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.functions import traced
from surgery.kernels.operators import Operator, Passes, Signature

OPERATIONS = (
    *("causal_conv", "ssd_scan", "ssd_step", "selective_scan", "selective_step", "graft_attention", "rms_norm"),
    "kl_divergence",  # of tuning
)
_requested: ContextVar[dict[str, str] | None] = ContextVar("surgery_kernels", default=None)


class KernelError(ValueError):
    """No such operation or backend, or one that was asked for and cannot serve."""


def _takes_everything(*_: Any) -> None:
    return None


@dataclass(frozen=True, eq=False)  # hashed by identity: by its fields would take longer than the rest of a choice
class Backend:
    """One implementation of an operation.

    run: computes, with the operation's arguments. refuses: with the same arguments, why it cannot take such a call (one line),
    or None; it is asked for every call, so it must be cheap. declines: likewise, why the next one is better for such a call;
    asked for by name, it serves. probed: whether `run` needs software that may be missing or broken, so that one small call
    must succeed first. on_request: whether it serves, or is even tried, only if it is asked for by name (because it downloads).
    opaque: whether PyTorch cannot look into `run`, so that a trace (torch.compile) has to call the operation's operator.
    passes: for that operator, its forward and its backward pass.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None] = _takes_everything
    declines: Callable[..., str | None] = _takes_everything
    probed: bool = False
    on_request: bool = False
    opaque: bool = False
    passes: Passes | None = None


class Operation:
    """Backends in order of preference; the last one is the reference. Call it with the operation's arguments.

    example: (device, dtype) -> small arguments, for the probe call. signature: of its operator; without one, an operation is
    for calls outside of traces.
    """

    registry: dict[str, "Operation"] = {}

    def __init__(
        self,
        name: str,
        *backends: Backend,
        example: Callable[[torch.device, torch.dtype], tuple],
        signature: Signature | None = None,
    ):
        self.name, self.example = name, example
        self.backends = {backend.name: backend for backend in backends}
        self.reference = backends[-1]
        self.registry[name] = self
        self.operator = None if signature is None else Operator(name, signature, self.backends)
        # torch.compile puts this into its graph as it stands, and then traces it with tensors that know their shapes alone.
        self.in_graph = torch.compiler.allow_in_graph(lambda backend, *args: self(*args, backend=backend))

    def __call__(self, *args: Any, backend: str | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.in_graph(backend, *args)
        chosen = self.choose(*args, backend=backend)
        if chosen.opaque and self.operator is not None and traced(*args):
            return self.operator(*args, backend=chosen.name)
        return chosen.run(*args)

    def choose(self, *args: Any, backend: str | None = None) -> Backend:
        """The backend for a call. Raises KernelError if the one that was asked for cannot serve."""
        if name := backend or requested().get(self.name):
            self.check(name)
            if reason := self.why_not(self.backends[name], *args, by_name=True):
                raise KernelError(f"{self.name}: the backend '{name}' was asked for and cannot serve: {reason}")
            return self.backends[name]
        for candidate in self.backends.values():
            if not candidate.declines(*args) and not self.why_not(candidate, *args):
                return candidate
        raise KernelError(f"no backend of {self.name} takes this call")

    def check(self, backend: str) -> None:
        """Raise KernelError if there is no such backend."""
        if backend not in self.backends:
            raise KernelError(f"{self.name} has no backend named '{backend}'; it has {', '.join(self.backends)}")

    def why_not(self, backend: Backend, *args: Any, by_name: bool = False) -> str | None:
        """Why `backend` cannot take such a call, or None. by_name: whether it was asked for by its name."""
        if backend.on_request and not by_name:
            return "it must be asked for by name"
        if reason := backend.refuses(*args):
            return reason
        return _probe(self, backend, args[0].device, args[0].dtype) if backend.probed else None


@cache
def _probe(operation: Operation, backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """One small call of the backend beside the reference; what went wrong, or None. In a thread of its own, where none of the
    caller's modes is on (autocast, torch.func, a default device, FakeTensorMode): the outcome is cached for the process."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try, operation, backend, device, dtype).result()


def _try(operation: Operation, backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        with torch.no_grad():
            args, again = operation.example(device, dtype), operation.example(device, dtype)
            if reason := backend.refuses(*args):
                return reason
            results = _tensors(backend.run(*args))
            expected = _tensors(operation.reference.run(*again))
        # Rounded to the dtype in other places, the two differ; a broken build is not off by a little.
        pairs = zip(results, expected, strict=True)
        error = max(((result.float() - true.float()).norm() / true.float().norm()).item() for result, true in pairs)
    except Exception as failure:  # whatever a foreign package throws is the reason why it does not serve
        return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    return None if error < 0.05 else f"its result is wrong: off by {error:.2g} on a small example"


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def not_for_cuda_package(x: Tensor, *_: Any) -> str | None:
    """Why the package of Mamba's authors does not take x, or None."""
    if x.device.type != "cuda":
        return "it runs on CUDA devices"
    return "it computes in float32" if x.dtype == torch.float64 else None


def ask(**backends: str) -> Token:
    """Ask for backends by operation from here on. Raises KernelError for an unknown name."""
    _check_known(backends)
    return _requested.set({**(_requested.get() or {}), **backends})


@contextmanager
def use(**backends: str) -> Iterator[None]:
    """Ask for backends by operation within a block, e.g. `with use(ssd_scan="stock"):`."""
    token = ask(**backends)
    try:
        yield
    finally:
        _requested.reset(token)


def requested() -> dict[str, str]:
    """Operation -> backend, as asked for by the environment or, before it, by `use` and `ask`."""
    return _parse(os.environ.get("SURGERY_KERNELS", "")) | (_requested.get() or {})


@cache
def _parse(text: str) -> dict[str, str]:
    pairs = [item.split("=", 1) for item in text.split(",") if item.strip()]
    if any(len(pair) != 2 or not pair[1].strip() for pair in pairs):
        raise KernelError("SURGERY_KERNELS must read operation=backend[,operation=backend...]")
    backends = {operation.strip(): name.strip() for operation, name in pairs}
    _check_known(backends)
    return backends


def _check_known(backends: Mapping[str, str]) -> None:
    for operation, backend in backends.items():
        if operation not in OPERATIONS:
            raise KernelError(f"no operation is named '{operation}'; there are {', '.join(OPERATIONS)}")
        if operation in Operation.registry:  # an exported checkpoint carries only the operations that it needs
            Operation.registry[operation].check(backend)
