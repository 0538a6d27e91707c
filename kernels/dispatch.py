"""Which implementation serves an operation.

Every operation lists its backends in order of preference. The first one serves unless another is asked for: by the call's
`backend` argument, inside `with use(ssd_scan="stock"):`, or by the environment variable SURGERY_KERNELS
("ssd_scan=stock,graft_attention=reference"), in this order. Asking for an operation or a backend that does not exist is an
error, never a silent fallback.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

OPERATIONS = ("ssd_scan", "ssd_step", "graft_attention")
_asked: ContextVar[Mapping[str, str] | None] = ContextVar("surgery_kernels", default=None)


@contextmanager
def use(**backends: str) -> Iterator[None]:
    """Ask for backends by operation within a block, e.g. `with use(ssd_scan="stock"):`."""
    _known(backends)
    token = _asked.set({**(_asked.get() or {}), **backends})
    try:
        yield
    finally:
        _asked.reset(token)


def choose(operation: str, backends: Mapping[str, Callable], x: Tensor, backend: str | None = None) -> Callable:
    """The function that serves `operation` for a tensor like `x`. Raises ValueError for an unknown backend."""
    name = backend or (_asked.get() or {}).get(operation) or _from_environment().get(operation) or next(iter(backends))
    if name not in backends:
        raise ValueError(f"{operation} has no backend named '{name}'; it has {', '.join(backends)}")
    return backends[name]


def _from_environment() -> dict[str, str]:
    pairs = [item.split("=", 1) for item in os.environ.get("SURGERY_KERNELS", "").split(",") if item.strip()]
    if any(len(pair) != 2 or not pair[1].strip() for pair in pairs):
        raise ValueError("SURGERY_KERNELS must read operation=backend[,operation=backend...]")
    asked = {operation.strip(): name.strip() for operation, name in pairs}
    _known(asked)
    return asked


def _known(operations: Iterable[str]) -> None:
    for operation in operations:
        if operation not in OPERATIONS:
            raise ValueError(f"no operation is named '{operation}'; there are {', '.join(OPERATIONS)}")
