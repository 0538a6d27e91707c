"""Which implementation serves an operation.

Every operation lists its backends in order of preference, and the first one that can take a call serves it. Another is asked
for by the call's `backend` argument, inside `with use(ssd_scan="stock"):` (or for a whole run, by a recipe's `kernels`), or by
the environment variable SURGERY_KERNELS ("ssd_scan=stock,graft_attention=reference"), in this order. A backend that was asked
for and cannot serve is an error, never a silent fallback.

Whether a backend can serve is decided by the call itself (device, dtype, shapes) and, where it needs software that may be
missing or broken (a GPU package built for another torch imports well and fails later; a compiler may be absent), by one small
real call that is compared with the reference (probing.py). `surgery doctor` prints the outcome.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.functions import learns, traced
from surgery.kernels.operators import Operator, Signature, TwoPasses
from surgery.kernels.probing import probe

OPERATIONS = (
    *("causal_conv", "ssd_scan", "ssd_step", "selective_scan", "selective_step", "delta_rule", "delta_step", "mlstm_scan"),
    *("lightning_scan", "graft_attention", "rms_norm"),
    "kl_divergence",  # of tuning
)
_own: ContextVar[dict[str, str] | None] = ContextVar("surgery_kernels", default=None)  # of this thread's `use` blocks
_open: tuple[dict[str, str], ...] = ()  # of all threads' `use` blocks that are open, the last one last
_opening = Lock()


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
    without_gradient: which of its results have no gradient, and say so when one is asked for.
    opaque: whether PyTorch cannot look into `run`, so that a trace (torch.compile) has to call the operation's operator.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None] = _takes_everything
    declines: Callable[..., str | None] = _takes_everything
    probed: bool = False
    on_request: bool = False
    without_gradient: tuple[int, ...] = ()
    opaque: bool = False

    @property
    def passes(self) -> TwoPasses | None:
        """Of a kernel that has two, for the operator."""
        return self.run if isinstance(self.run, TwoPasses) else None


class Operation:
    """Backends in order of preference; the last one is the reference. Call it with the operation's arguments.

    example: (device, dtype) -> small arguments, for the probe call; the same numbers whatever torch's defaults are.
    differentiable: whether it has a gradient, in every floating-point argument.
    signature: of its operator; without one, an operation is for calls outside of traces.
    """

    registry: dict[str, "Operation"] = {}

    def __init__(
        self,
        name: str,
        *backends: Backend,
        example: Callable[[torch.device, torch.dtype], tuple],
        differentiable: bool = True,
        signature: Signature | None = None,
    ):
        self.name, self.example, self.differentiable = name, example, differentiable
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
        if not backend.probed:
            return None
        learning = self.differentiable and learns(*(m for m in args if isinstance(m, Tensor)))
        return probe(self, backend, args[0].device, args[0].dtype, learning)


def not_for_cuda_package(x: Tensor, *_: Any) -> str | None:
    """Why the package of Mamba's authors does not take x, or None."""
    if x.device.type != "cuda":
        return "it runs on CUDA devices"
    return "it computes in float32" if x.dtype == torch.float64 else None


@contextmanager
def use(**backends: str) -> Iterator[None]:
    """Ask for backends by operation within a block, e.g. `with use(ssd_scan="stock"):`. Raises KernelError for an unknown name.

    It holds for the whole process: in threads that the block starts or that serve it (streamers, data parallel, checkpoint
    recomputation). A thread with blocks of its own goes by those; of several threads' blocks the one opened last holds
    elsewhere. A block that is left before the backward pass of what it computed does not hold in that pass.
    """
    global _open  # noqa: PLW0603  # a choice for the process
    _check_known(backends)
    chosen = {**_chosen(), **backends}
    token = _own.set(chosen)
    with _opening:
        _open = (*_open, chosen)
    try:
        yield
    finally:
        with _opening:
            _open = tuple(other for other in _open if other is not chosen)
        _own.reset(token)


def requested() -> dict[str, str]:
    """Operation -> backend, as asked for by the environment or, before it, by `use`."""
    return _parse(os.environ.get("SURGERY_KERNELS", "")) | _chosen()


def _chosen() -> dict[str, str]:
    own, everywhere = _own.get(), _open
    if own is not None:
        return own
    return everywhere[-1] if everywhere else {}


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
