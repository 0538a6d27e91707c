"""Which implementation serves an operation.

Every operation lists its backends in order of preference, and the first one that can take a call serves it. Whether one can is
decided by the call itself (`refuses`: device, dtype, shapes) and, where it needs software that may be missing or broken, by a
trial: once for each kind of call the backend computes an example as wide as the call, with the same dtypes, strides and masks,
with its gradients where the call needs them, beside the last backend in float64. One that fails there, or at a real call, is
refused for that kind of call, which is said once, and the next serves.

SURGERY_KERNELS asks for backends by name ("ssd_scan=chunked,attend=sdpa", or "hub" for all that the Hub has), and so does the
argument `backend` of a call. A backend that was asked for and cannot serve is an error.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from threading import Thread
from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.errors import UserError
from surgery.kernels.functions import as_tuple, learns, traced
from surgery.kernels.operators import Likeness, Operator

SHORT = 80  # tokens of an example: more than a block of most kernels
SMALL = {"b": 2, "t": 40, "s": 40, "h": 4, "g": 1, "p": 16, "n": 16, "d": 24, "c": 16, "w": 24}
MODULES = ("attention", "conv", "selective", "ssd")  # that define operations
TOO_LARGE = torch.OutOfMemoryError  # says nothing about a backend: the call was too large


class KernelError(UserError):
    """No such operation or backend, or one that was asked for and cannot serve."""


@dataclass(frozen=True, eq=False)
class Backend:
    """One implementation of an operation.

    run: computes, with the operation's arguments. device: the type of device that it is for, None for any. refuses: with the
    same arguments, why it cannot take such a call (one line), or None; it is asked for every call on such a device, so it has
    to be cheap. probed: whether a trial comes first; by_size: whether there is one for every size, as for what is compiled for
    a GPU. on_request: whether it serves only if it is asked for, because it downloads. without_gradient: which of its results
    have none. opaque: whether torch.compile cannot look into it.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None] = lambda *_: None
    device: str | None = None
    probed: bool = False
    by_size: bool = False
    on_request: bool = False
    without_gradient: tuple[int, ...] = ()
    opaque: bool = False

    def elsewhere(self, x: Tensor) -> str | None:
        """Why this does not run on the device of x, or None."""
        if self.device in (None, x.device.type):
            return None
        return "it runs on CUDA devices" if self.device == "cuda" else f"it runs on a {str(self.device).upper()}"


ON_GPU: dict[str, Any] = {"device": "cuda", "probed": True, "by_size": True, "opaque": True}


@dataclass(frozen=True)
class Argument:
    """Written name:dims. After the name: ? it may be None, ! it is changed in place. After dims: + positive, - negative, #
    document numbers (int32), & which tokens exist (bool). name=type is a number. schema: the same in the words of
    torch.library."""

    name: str
    dims: str
    kind: str
    schema: str

    @classmethod
    def parse(cls, text: str) -> "Argument":
        name, tensor, rest = re.split("([:=])", text)
        if tensor == "=":
            return cls(name, "", rest, f"{rest} {name}")
        kind = {"?": "Tensor?", "!": "Tensor(a!)"}.get(name[-1], "Tensor")
        return cls(name, rest.rstrip("+-#&"), rest[-1], f"{kind} {name.rstrip('?!')}")


class Operation:
    """Backends in order of preference; the last one is the reference. Call it with the operation's arguments.

    arguments: their specification (Argument). like: (*arguments) -> shape and dtype of every result.
    """

    registry: ClassVar[dict[str, "Operation"]] = {}

    def __init__(self, name: str, arguments: str, like: Callable[..., list[Likeness]], results: int, *backends: Backend):
        self.name, self.arguments = name, [Argument.parse(text) for text in arguments.split()]
        self.backends = {backend.name: backend for backend in backends}
        self.reference = backends[-1]
        self.differentiable = not any(argument.name.endswith("!") for argument in self.arguments)
        self.refused: dict[tuple, str | None] = {}  # kind of call -> why a backend does not serve it, or None
        self.registry[name] = self
        schemas = [argument.schema for argument in self.arguments]
        self.operator = Operator(name, schemas, results, like, self.backends)
        # torch.compile puts this into its graph as it stands, and then traces it with tensors that know their shapes alone.
        self.in_graph = torch.compiler.allow_in_graph(lambda backend, *args: self(*args, backend=backend))

    def __call__(self, *args: Any, backend: str | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.in_graph(backend, *args)
        asked, offered = self._offered(backend)
        for candidate in offered:
            # As in why_not, without a frame of its own: this is asked at every call.
            reason = candidate.elsewhere(args[0]) or candidate.refuses(*args) or self._failure(candidate, args)
            if reason is None:
                if candidate.opaque and traced(*args):
                    return self.operator(*args, backend=candidate.name)
                try:
                    return candidate.run(*args)
                except TOO_LARGE:
                    raise
                except Exception as failure:
                    if not candidate.by_size or asked:
                        raise
                    self._refuse(candidate, self._key(candidate, args), failure)
            elif asked:
                raise KernelError(f"{self.name}: the backend '{asked}' was asked for and cannot serve: {reason}")
        raise KernelError(f"no backend of {self.name} takes this call")

    def choose(self, *args: Any) -> Backend:
        """The backend that would serve a call for which none is asked for."""
        return next(each for each in self.backends.values() if not each.on_request and self.why_not(each, *args) is None)

    def takes_packed(self, *args: Any, backend: str | None = None) -> bool:
        """Whether a call with several documents in a row is served as it stands, and not by the reference."""
        served = (each for each in self._offered(backend)[1] if self.why_not(each, *args) is None)
        return next(served, self.reference) is not self.reference

    def _offered(self, backend: str | None) -> tuple[str | None, list[Backend]]:
        """(the backend that is asked for, here or by SURGERY_KERNELS; those that may serve). Raises KernelError for a name that
        there is not."""
        asked = backend or parse_requests(os.environ.get("SURGERY_KERNELS", "")).get(self.name)
        if asked is None:
            return None, [each for each in self.backends.values() if not each.on_request]
        if asked not in self.backends:
            raise KernelError(f"{self.name} has no backend named '{asked}'; it has {', '.join(self.backends)}")
        return asked, [self.backends[asked]]

    def why_not(self, backend: Backend, *args: Any) -> str | None:
        """Why `backend` does not take such a call, or None."""
        return backend.elsewhere(args[0]) or backend.refuses(*args) or self._failure(backend, args)

    def _failure(self, backend: Backend, args: tuple) -> str | None:
        """Why a trial of `backend` failed for this kind of call, or None."""
        if not backend.probed:
            return None
        key = self._key(backend, args)
        if key not in self.refused:
            self.refused[key] = None
            # In a thread of its own none of the caller's modes is on: autocast, inference_mode, a default device, fake tensors.
            # A daemon: a trial that hangs, or compiles for minutes, ends with the program.
            failures: list[BaseException] = []

            def attempt() -> None:
                try:
                    self._compare(backend, args, key[-1])
                except BaseException as failure:  # whatever a foreign package throws is the reason why it does not serve
                    failures.append(failure)

            thread = Thread(target=attempt, daemon=True)
            thread.start()
            thread.join()
            for failure in failures:
                self._refuse(backend, key, failure)
        return self.refused[key]

    def _key(self, backend: Backend, args: tuple) -> tuple:
        learning = self.differentiable and learns(*(m for m in args if isinstance(m, Tensor)))
        first = args[0]
        if not backend.by_size:
            return backend, first.device.type, first.dtype, learning
        kinds = (
            (m.dtype, m.stride(-1) == 1, *(n for n, dim in zip(m.shape, a.dims, strict=True) if dim not in "bts"))
            if isinstance(m, Tensor)
            else m is None
            for m, a in zip(args, self.arguments, strict=True)
        )
        return backend, first.device, *kinds, learning

    def _refuse(self, backend: Backend, key: tuple, failure: BaseException) -> None:
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        self.refused[key] = reason
        if not isinstance(failure, ImportError):  # what is not installed is no news
            warnings.warn(f"{self.name}: '{backend.name}' does not serve here, the next does ({reason})", stacklevel=4)

    def _compare(self, backend: Backend, args: tuple, learning: bool) -> None:
        own = self.example(args, small=not backend.by_size)
        exact = [m.to(torch.float64, copy=True) if _real(m) else m for m in own]
        for m in filter(_real, (*own, *exact)):
            m.requires_grad_(learning)
        with torch.set_grad_enabled(learning):
            results, truths = as_tuple(backend.run(*own)), as_tuple(self.reference.run(*exact))
            pairs = [*zip(results, truths, strict=True)]
            if learning:
                with_gradient = [pair for i, pair in enumerate(pairs) if i not in backend.without_gradient]
                inputs = [filter(_real, each) for each in (own, exact)]
                gradients = [torch.autograd.grad(
                    [pair[i] for pair in with_gradient], [*inputs[i]], [pair[i].detach().cos() for pair in with_gradient],
                    allow_unused=True,
                ) for i in range(2)]  # fmt: skip
                pairs += [pair for pair in zip(*gradients, strict=True) if None not in pair]
            else:
                pairs += [(m, e) for m, e in zip(own, exact, strict=True) if _real(m)]  # what a step writes into its state
        # Kernels may round inside, to TensorFloat-32 or to 16 bits after every token; a broken build is not off by so little.
        bound = 0.02 if own[0].dtype in (torch.float32, torch.float64) else 0.1
        for result, truth in pairs:
            error = (result.double() - truth).norm().item() / max(truth.norm().item(), 1e-20)
            if result.shape != truth.shape or not error < bound:
                raise ArithmeticError(f"it is wrong: off by {error:.2g} on an example")

    def example(self, args: tuple, small: bool) -> list[Any]:
        """Random arguments like those of a call: as wide (or `small`), with as many tokens as SHORT at most."""
        draw = torch.Generator("cpu").manual_seed(0)
        cut = {"b": 2, "t": SHORT, "s": SHORT} if not small else SMALL
        made: list[Any] = []
        for m, argument in zip(args, self.arguments, strict=True):
            if not isinstance(m, Tensor):
                made.append(min(m, cut["t"]) if argument.kind == "SymInt" and argument.name == "t" else m)
                continue
            sizes = [min(int(n), cut.get(dim, int(n))) for n, dim in zip(m.shape, argument.dims, strict=True)]
            if argument.kind == "#":
                values = (torch.arange(sizes[1]) >= sizes[1] // 2).expand(sizes)
            elif argument.kind == "&":
                values = (torch.arange(sizes[1]) > 2).expand(sizes)
            elif argument.kind in "+-":
                uniform = torch.rand(*sizes, generator=draw, dtype=torch.float32, device="cpu")
                values = 0.01 + 0.1 * uniform if argument.kind == "+" else -1 - uniform
            else:
                values = torch.randn(*sizes, generator=draw, dtype=torch.float32, device="cpu")
            values = values.to(m.device, m.dtype).contiguous()
            if not small and 0 not in m.stride():  # with the strides of the call
                values = torch.empty_strided(sizes, m.stride(), dtype=m.dtype, device=m.device).copy_(values)
            made.append(values)
        return made


def _real(m: Any) -> bool:
    return isinstance(m, Tensor) and m.is_floating_point()


@cache
def parse_requests(text: str) -> dict[str, str]:
    """Operation -> the backend that SURGERY_KERNELS asks for."""
    for module in MODULES:
        import_module(f"surgery.kernels.{module}")
    if text.strip() == "hub":
        return {name: "hub" for name, operation in Operation.registry.items() if "hub" in operation.backends}
    pairs = [item.split("=", 1) for item in text.split(",") if item.strip()]
    if any(len(pair) != 2 or not pair[1].strip() for pair in pairs):
        raise KernelError("SURGERY_KERNELS must read operation=backend[,operation=backend...]")
    asked = {operation.strip(): name.strip() for operation, name in pairs}
    if unknown := sorted(asked.keys() - Operation.registry.keys()):
        known = ", ".join(sorted(Operation.registry))
        raise KernelError(f"SURGERY_KERNELS: there is no operation '{unknown[0]}'; there are {known}")
    return asked


def import_alone(name: str) -> Any:
    """A module of a package; the module alone where the package cannot be imported because a compiled part of it is missing,
    which what is in Triton does not need."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        spec = find_spec(package)
        if spec is None:
            raise
        sys.modules[package] = module_from_spec(spec)  # it is not executed
        try:
            return import_module(name)
        finally:
            del sys.modules[package]


@cache
def hub(name: str, version: int) -> Any:
    """A package of kernels from Hugging Face's Hub, in the version that transformers uses; it is downloaded."""
    get_kernel: Any = import_module("kernels").get_kernel
    return get_kernel(f"kernels-community/{name}", version=version)
