"""Whether a backend serves here: a small call of it, with its gradients, beside the reference in float64.

The call runs in a thread of its own, where none of the caller's modes is on (a default device, autocast, inference_mode,
torch.func, FakeTensorMode), so what it finds holds for the process and is kept. What fails in passing (no memory, a full disk,
a compiler that was killed) says nothing about the backend: after a while it is tried again.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.functions import as_tuple

AGAIN = 30.0  # seconds until what failed in passing is tried again: an attempt may be a compilation of seconds
PASSING = frozenset(
    getattr(errno, name)
    for name in "ENOSPC EDQUOT ENOMEM EMFILE ENFILE EAGAIN EINTR EIO ESTALE ETIMEDOUT ETXTBSY EBUSY".split()
)
# The same in the words of compilers, of torch and of the threads of Python.
WORDS = (
    *("no space left", "disk quota exceeded", "out of memory", "cannot allocate memory", "can't allocate memory"),
    *("not enough memory", "virtual memory exhausted", "no memory for", "too many open files", "temporarily unavailable"),
    *("killed signal", "error: killed", "can't start new thread", "can't create new thread"),
)


class PassingError(RuntimeError):
    """A failure that says nothing about what was tried: it may well succeed later."""


@dataclass(frozen=True)
class ProbeOutcome:
    """reason: why a backend does not serve, or None. again: when to try again (time.monotonic), or None for never."""

    reason: str | None
    again: float | None = None

    def holds(self, learning: bool) -> bool:
        """Whether it need not be found out again now. A backward pass, and what is checkpointed for one, has to end with the
        backend with which it began."""
        return self.again is None or time.monotonic() < self.again or (learning and _recomputed())


_outcomes: dict[tuple, ProbeOutcome] = {}
_locks: dict[tuple, Lock] = {}  # the first of several threads finds out, and the others wait for it
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)  # the thread that would open them stays behind


def probe(operation: Any, backend: Any, device: torch.device, dtype: torch.dtype, learning: bool) -> str | None:
    """Why a backend of an operation does not serve on `device` in `dtype`, or None. learning: whether its gradients count."""
    key = (operation, backend, device, dtype, learning)
    known = _outcomes.get(key)
    if known is None or not known.holds(learning):
        with _locks.setdefault(key, Lock()):
            known = _outcomes.get(key)
            if known is None or not known.holds(learning):
                known = _outcomes[key] = _apart(lambda: _try(operation, backend, device, dtype, learning))
    return known.reason


def forget() -> None:
    """Find everything out anew."""
    _outcomes.clear()


def passing(failure: BaseException) -> bool:
    """Whether a failure may be gone the next time."""
    if isinstance(failure, PassingError | MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(failure, OSError) and failure.errno in PASSING:
        return True
    cause, text = failure.__cause__, str(failure).lower()
    return any(words in text for words in WORDS) or (cause is not None and passing(cause))


def _apart(find_out: Callable[[], str | None]) -> ProbeOutcome:
    outcomes = []

    def run() -> None:
        try:
            outcomes.append(ProbeOutcome(find_out()))
        except (Exception, SystemExit) as failure:  # whatever a foreign package throws is the reason why it does not serve
            outcomes.append(_failed(failure))

    thread = Thread(target=run, name="surgery-probe", daemon=True)
    try:
        thread.start()
    except RuntimeError as failure:  # there are too many threads, or Python is about to end
        return _failed(failure)
    thread.join()
    return outcomes[0]


def _failed(failure: BaseException) -> ProbeOutcome:
    reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    return ProbeOutcome(reason, time.monotonic() + AGAIN if passing(failure) else None)


def _try(operation: Any, backend: Any, device: torch.device, dtype: torch.dtype, learning: bool) -> str | None:
    args = [m.detach() if _real(m) else m for m in operation.example(device, dtype)]
    exact_args = [m.to("cpu", torch.float64, copy=True) if _real(m) else m for m in args]
    for m in filter(_real, (*args, *exact_args)):
        m.requires_grad_(learning)
    with torch.set_grad_enabled(learning):
        if reason := backend.refuses(*args):
            return reason
        results, exact = as_tuple(backend.run(*args)), as_tuple(operation.reference.run(*exact_args))
    # Kernels may round inside, to TensorFloat-32 or to 16 bits after every token; a broken build is not off by so little.
    bound = 0.02 if dtype in (torch.float32, torch.float64) else 0.1
    if reason := _wrong("result", results, exact, bound):
        return reason
    if not learning:  # what a step has written into its state, and that nothing else was written to
        return _wrong("effect on its arguments", [*filter(_real, args)], [*filter(_real, exact_args)], bound)
    pairs = [(m, e) for i, (m, e) in enumerate(zip(results, exact, strict=True)) if i not in backend.without_gradient]
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(e.shape, generator=g, dtype=torch.float64, device="cpu") for _, e in pairs]
    gradients, exact_gradients = (
        torch.autograd.grad(
            [pair[which] for pair in pairs],
            [m for m in each if _real(m)],
            [weight.to(pair[which]) for weight, pair in zip(weights, pairs, strict=True)],
        )
        for which, each in enumerate((args, exact_args))
    )
    return _wrong("gradient", gradients, exact_gradients, bound)


def _wrong(what: str, results: Any, exact: Any, bound: float) -> str | None:
    for result, truth in zip(results, exact, strict=True):
        if result.shape != truth.shape:
            return f"its {what} has the shape {tuple(result.shape)} where {tuple(truth.shape)} belongs"
        error = max(_errors(result.detach().to("cpu", torch.float64), truth.detach()))
        if not error < bound:
            return f"its {what} is wrong: off by {error:.2g} on a small example"
    return None


def _errors(result: Tensor, truth: Tensor) -> Iterator[float]:
    """The whole error, and the largest of a number: a single one that was left out changes the whole little."""
    for size in (torch.linalg.vector_norm, lambda m: m.abs().max()):
        error, of = size(result - truth).item(), size(truth).item()
        yield error / of if of else float(error != 0)


def _real(m: Any) -> bool:
    return isinstance(m, Tensor) and m.is_floating_point()


def _recomputed() -> bool:
    """Whether what runs now belongs to a backward pass, or will be computed again in one."""
    if torch._C._current_graph_task_id() != -1:
        return True
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(False) is not None
