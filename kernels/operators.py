"""Operations as operators of PyTorch (torch.library): for torch.compile, torch.export, FakeTensorMode and all else that looks
at a call without computing it.

Where PyTorch cannot look into a backend (C, a foreign package, a loop over the text), a trace calls the operator of its
operation, which carries the backend's name: the choice is made when the call is traced, and holds in every thread that runs the
trace later. An operator knows the shapes and dtypes of its results without computing, and has a gradient, which is an operator
as well: that of `ssd_scan` is `ssd_scan_backward`. Outside of traces nothing goes through here: that would take longer than the
kernels of a small model.

The operators of the package are torch.ops.surgery.*. The copy of this file in an exported folder has a namespace of its own,
since several folders, of different versions, may be loaded side by side.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import as_tuple, learns, own_precision, without_autocast

Likeness = tuple[Sequence[int], torch.dtype]


@dataclass(frozen=True, eq=False)
class TwoPasses:
    """A kernel of two passes, each written without autograd. Called with the operation's arguments, it gives the results, with
    their gradient.

    forward: (*arguments, keep) -> (*results, kept), where `kept` is a tensor for the other pass, or None.
    backward: (gradients of the results, arguments, kept, needed) -> a gradient for every argument, None where it is not needed.
    A result that nobody used has None for its gradient.
    kept: (*arguments) -> shape and dtype of what is kept; None where nothing is.
    unread: numbers of the arguments that the backward pass does not read: they may change before it."""

    forward: Callable[..., tuple]
    backward: Callable[..., Sequence[Tensor | None]]
    kept: Callable[..., Likeness] | None = None
    unread: tuple[int, ...] = ()

    def __call__(self, *args: Any) -> Any:
        if learns(*(m for m in args if isinstance(m, Tensor))):
            return _Differentiable.apply(self, *args)
        return _one_or_all(self.forward(*args, keep=False)[:-1])


class _Differentiable(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, passes: TwoPasses, *args: Any) -> Any:
        *results, kept = passes.forward(*args, keep=True)
        ctx.passes = passes
        _save(ctx, [None if i in passes.unread else m for i, m in enumerate(args)], kept)
        return _one_or_all(results)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        *args, kept = _restored(ctx)
        needed = ctx.needs_input_grad[1:]
        computed = ctx.passes.backward(gradients, args, kept, needed)
        return None, *(m if want else None for m, want in zip(computed, needed, strict=True))


@dataclass(frozen=True)
class Signature:
    """Of an operation. arguments: their schemas; one that is changed says so, "Tensor(a!) state", and then there is no
    gradient. like: (*arguments) -> shape and dtype of every result."""

    arguments: tuple[str, ...]
    results: int
    like: Callable[..., Sequence[Likeness]]


class Operator:
    """The operator of an operation. Of a backend without `passes`, the backward pass computes the forward pass again.

    backends: name -> Backend (dispatch.py).
    """

    def __init__(self, name: str, signature: "Signature", backends: Mapping[str, Any]):
        self.like, self.backends = signature.like, backends
        self.results = results = signature.results
        arguments = signature.arguments
        self.tensors = [i for i, argument in enumerate(arguments) if argument.startswith("Tensor")]
        self.learns = not any("!" in argument for argument in arguments)
        own = ", ".join(arguments)
        kept = int(self.learns)
        keep = ", bool keep" * kept
        self.forward = _define(
            name, f"({own}{keep}, str backend) -> ({_tensors(results + kept)})", self._forward, self._like_forward
        )
        if self.learns:
            given = [f"Tensor? gradient{i}" for i in range(results)]
            self.backward = _define(
                f"{name}_backward",
                f"({', '.join(given)}, Tensor kept, {own}, bool[] needed, str backend) -> ({_tensors(len(self.tensors))})",
                self._backward,
                self._like_backward,
            )
            torch.library.register_autograd(self.forward, self._differentiate, setup_context=_save_call, lib=LIBRARY)

    def __call__(self, *args: Any, backend: str) -> Any:
        """Call it, with the operation's arguments."""
        if not self.learns:
            return self.forward(*args, backend)
        keep = torch.is_grad_enabled() and any(args[i] is not None and args[i].requires_grad for i in self.tensors)
        return _one_or_all(self.forward(*args, keep, backend)[: self.results])

    def _forward(self, *given: Any) -> Any:
        (*args, keep, backend) = given if self.learns else (*given[:-1], False, given[-1])
        chosen = self.backends[backend]
        with own_precision(args[0].device.type), torch.no_grad():
            if keep and chosen.passes is not None:
                *results, kept = chosen.passes.forward(*args, keep=True)
            else:
                results, kept = as_tuple(chosen.run(*args)), None
            fitted = [_fitted(result, dtype) for result, (_, dtype) in zip(results, self.like(*args), strict=True)]
        if not self.learns:
            return _one_or_all(fitted)
        kept = _nothing(args[0]) if kept is None else kept
        shared = any(m.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr() for m in fitted)
        return *fitted, kept.clone() if shared else kept  # results of an operator share no memory

    def _like_forward(self, *given: Any) -> Any:
        (*args, keep, backend) = given if self.learns else (*given[:-1], False, given[-1])
        results = [args[0].new_empty(shape, dtype=dtype) for shape, dtype in self.like(*args)]
        if not self.learns:
            return _one_or_all(results)
        passes = self.backends[backend].passes
        kept = passes.kept if keep and passes is not None else None
        shape, dtype = ((0,), args[0].dtype) if kept is None else kept(*args)
        return (*results, args[0].new_empty(shape, dtype=dtype))

    def _backward(self, *given: Any) -> tuple[Tensor, ...]:
        gradients, kept, args, needed, backend = self._split(given)
        chosen = self.backends[backend]
        tensors = [args[i] for i in self.tensors]
        with own_precision(args[0].device.type):
            if chosen.passes is not None:
                flags = dict(zip(self.tensors, needed, strict=True))
                with torch.no_grad():
                    of_all = chosen.passes.backward(gradients, args, kept, [flags.get(i, False) for i in range(len(args))])
                computed = [of_all[i] for i in self.tensors]
            else:
                computed = self._again(chosen.run, gradients, args, needed)
        return tuple(
            _fitted(torch.zeros_like(m) if gradient is None else gradient, m.dtype) if want else _nothing(kept)
            for gradient, m, want in zip(computed, tensors, needed, strict=True)
        )

    def _again(self, run: Callable[..., Any], gradients: Sequence[Tensor | None], args: list, needed: Sequence[bool]) -> list:
        """The gradients by autograd, through a forward pass of its own."""
        args = list(args)
        for i, want in zip(self.tensors, needed, strict=True):
            args[i] = None if args[i] is None else args[i].detach().requires_grad_(want)
        leaves = [args[i] for i, want in zip(self.tensors, needed, strict=True) if want]
        with torch.enable_grad():
            results = as_tuple(run(*args))
        pairs = [(m, g.to(m.dtype)) for m, g in zip(results, gradients, strict=True) if g is not None and m.requires_grad]
        computed = iter(torch.autograd.grad([m for m, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
        return [next(computed) if want else None for want in needed]

    def _like_backward(self, *given: Any) -> tuple[Tensor, ...]:
        _, kept, args, needed, _ = self._split(given)
        pairs = zip((args[i] for i in self.tensors), needed, strict=True)
        return tuple(
            torch.empty_like(m, memory_format=torch.contiguous_format) if want else _nothing(kept) for m, want in pairs
        )

    def _split(self, given: tuple) -> tuple:
        gradients, kept, *args, needed, backend = given[: self.results], *given[self.results :]
        return gradients, kept, args, needed, backend

    def _differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple:
        *args, kept = _restored(ctx)
        needed = [ctx.needs_input_grad[i] for i in self.tensors]
        computed = self.backward(*gradients[: self.results], kept, *args, needed, ctx.backend)
        result: list[Tensor | None] = [None] * (len(args) + 2)
        for i, gradient, want in zip(self.tensors, computed, needed, strict=True):
            result[i] = gradient if want else None
        return tuple(result)


_SAVED = object()


def _save_call(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *args, _, ctx.backend = inputs
    ctx.mark_non_differentiable(output[-1])
    _save(ctx, args, output[-1])


def _save(ctx: Any, args: Sequence[Any], kept: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.constants = [_SAVED if isinstance(m, Tensor) else m for m in (*args, kept)]
    ctx.save_for_backward(*(m for m in (*args, kept) if isinstance(m, Tensor)))


def _restored(ctx: Any) -> list:
    """The arguments and what was kept."""
    saved = iter(ctx.saved_tensors)
    return [next(saved) if constant is _SAVED else constant for constant in ctx.constants]


def _define(name: str, schema: str, compute: Callable[..., Any], like: Callable[..., Any]) -> Any:
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{LIBRARY.ns}::{name}", like, lib=LIBRARY)
    return getattr(getattr(torch.ops, LIBRARY.ns), name).default


def _library() -> torch.library.Library:
    """A namespace that nothing else has defined."""
    name = "surgery"
    if not __name__.startswith("surgery."):
        name += "_" + hashlib.sha256(__name__.encode()).hexdigest()[:8]
    for number in count():
        try:
            return torch.library.Library(f"{name}_{number}" if number else name, "DEF")
        except RuntimeError:  # this file was executed before
            continue
    raise AssertionError


LIBRARY = _library()


def _tensors(number: int) -> str:
    return ", ".join(["Tensor"] * number)


def _one_or_all(results: Sequence[Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _nothing(like: Tensor) -> Tensor:
    """A gradient that nobody needs."""
    return like.new_empty(0)


def _fitted(m: Tensor, dtype: torch.dtype) -> Tensor:
    """m as the trace was told that it would be."""
    return m.to(dtype).contiguous()
