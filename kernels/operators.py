"""A kernel of two passes, and operators: what torch.compile, torch.export and FakeTensorMode see of an operation.

A trace cannot look into C, Triton or another package, so there the operation is one node: an operator that says how its results
look. Its backward pass computes the forward pass again. Calls outside of traces do without it, which is quicker.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.functions import as_tuple, learns, own_precision

Likeness = tuple[Sequence[int], torch.dtype]
LIBRARY = torch.library.Library("surgery", "FRAGMENT")


@dataclass(frozen=True, eq=False)
class TwoPasses:
    """A kernel of two passes, each written without autograd. Called with the operation's arguments, it gives the results, with
    their gradient.

    forward: (*arguments, keep) -> (*results, kept), where `kept` is a tensor for the other pass, or None.
    backward: (gradients of the results, arguments, kept) -> a gradient for every argument that has one, else None. For a result
    that nobody used the gradient is None. unread: numbers of the arguments that the backward pass does not read: they may
    change before it.
    """

    forward: Callable[..., tuple]
    backward: Callable[..., Sequence[Tensor | None]]
    unread: tuple[int, ...] = ()

    def __call__(self, *args: Any) -> Any:
        if learns(*(m for m in args if isinstance(m, Tensor))):
            return _Differentiable.apply(self, *args)
        results = self.forward(*args, keep=False)[:-1]
        return results[0] if len(results) == 1 else tuple(results)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: TwoPasses, *args: Any) -> Any:
        with own_precision(args[0]):
            *results, kept = passes.forward(*args, keep=True)
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        saved = [*(None if i in passes.unread else m for i, m in enumerate(args)), kept]
        ctx.numbers = [None if isinstance(m, Tensor) else m for m in saved]
        ctx.save_for_backward(*(m if isinstance(m, Tensor) else None for m in saved))
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        *args, kept = (number if m is None else m for m, number in zip(ctx.saved_tensors, ctx.numbers, strict=True))
        with own_precision(args[0]):
            computed = ctx.passes.backward(gradients, args, kept)
        return None, *(m if want else None for m, want in zip(computed, ctx.needs_input_grad[1:], strict=True))


class Operator:
    """The operator of an operation.

    schemas: of its arguments; one that is changed says so, "Tensor(a!) state", and then there is no gradient. like:
    (*arguments) -> shape and dtype of every result. backends: name -> Backend (choose.py).
    """

    def __init__(self, name: str, schemas: Sequence[str], results: int, like: Callable[..., Any], backends: Mapping[str, Any]):
        self.like, self.backends = like, backends
        self.tensors = [i for i, schema in enumerate(schemas) if schema.startswith("Tensor")]
        own, given = ", ".join(schemas), ", ".join(f"Tensor? gradient{i}" for i in range(results))
        gives = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        self.forward = _define(name, f"({own}, str backend) -> {gives}", self._forward, self._like)
        if not any("!" in schema for schema in schemas):
            several = f"({given}, {own}, bool[] needed, str backend) -> Tensor[]"
            self.backward = _define(f"{name}_backward", several, self._backward, self._like_backward)
            torch.library.register_autograd(self.forward, self._differentiate, setup_context=self._save, lib=LIBRARY)
        self.results = results

    def __call__(self, *args: Any, backend: str) -> Any:
        """Call it, with the operation's arguments."""
        return self.forward(*args, backend)

    def _forward(self, *given: Any) -> Any:
        *args, backend = given
        with own_precision(args[0]), torch.no_grad():
            results = as_tuple(self.backends[backend].run(*args))
        # As the trace was told that they would be.
        fitted = [m.to(dtype).contiguous() for m, (_, dtype) in zip(results, self.like(*args), strict=True)]
        return fitted[0] if len(fitted) == 1 else tuple(fitted)

    def _like(self, *given: Any) -> Any:
        *args, _ = given
        results = [args[0].new_empty(shape, dtype=dtype) for shape, dtype in self.like(*args)]
        return results[0] if len(results) == 1 else tuple(results)

    def _backward(self, *given: Any) -> list[Tensor]:
        gradients, (*args, needed, backend) = given[: self.results], given[self.results :]
        for i, want in zip(self.tensors, needed, strict=True):
            args[i] = None if args[i] is None else args[i].detach().requires_grad_(want)
        leaves = [args[i] for i, want in zip(self.tensors, needed, strict=True) if want]
        with torch.enable_grad(), own_precision(args[0]):
            results = as_tuple(self.backends[backend].run(*args))
        pairs = [(m, g.to(m.dtype)) for m, g in zip(results, gradients, strict=True) if g is not None and m.requires_grad]
        computed = torch.autograd.grad(
            [m for m, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True, materialize_grads=True
        )
        return [m.contiguous() for m in computed]

    def _like_backward(self, *given: Any) -> list[Tensor]:
        *args, needed, _ = given[self.results :]
        of = [args[i] for i, want in zip(self.tensors, needed, strict=True) if want]
        return [torch.empty_like(m, memory_format=torch.contiguous_format) for m in of]

    def _save(self, ctx: Any, inputs: tuple, output: Any) -> None:
        *args, ctx.backend = inputs
        ctx.set_materialize_grads(False)
        ctx.numbers = [None if isinstance(m, Tensor) else m for m in args]
        ctx.save_for_backward(*(m if isinstance(m, Tensor) else None for m in args))

    def _differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple:
        args = [number if m is None else m for m, number in zip(ctx.saved_tensors, ctx.numbers, strict=True)]
        needed = [ctx.needs_input_grad[i] for i in self.tensors]
        computed = iter(self.backward(*gradients, *args, needed, ctx.backend))
        result: list[Tensor | None] = [None] * (len(args) + 1)
        for i, want in zip(self.tensors, needed, strict=True):
            result[i] = next(computed) if want else None
        return tuple(result)


def _define(name: str, schema: str, compute: Callable[..., Any], like: Callable[..., Any]) -> Any:
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"surgery::{name}", like, lib=LIBRARY)
    return getattr(torch.ops.surgery, name).default
