"""A GPU that is none, whose tensors have values: they live in the host's memory and say that they do not.

A whole verb runs, which looks at scores, ranks heads, writes files, and what comes out is compared with what comes out on a
CPU. The rules are those of CUDA: tensors of two devices do not meet, except a number with what it is multiplied by; what is
looked at is copied to the host, and the host waits for it.

Everything is watched by a mode, which must be on wherever such tensors are used. Like device.py's, the device belongs to the
whole process.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.rehearsal.device import NAME, PRODUCTS, READS, RehearsalError, register

ROOT = Path(__file__).parents[2]
BETWEEN = {"_to_copy", "copy_"}  # operations that take tensors of two devices
BETWEEN_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # indices may be the host's: they are copied


class OnDevice(Tensor):
    """A tensor of the device. held: its values, on the host, with the same shape and strides."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0), requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu() first")

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: "OnDevice") -> None:
        """torch puts the other's shape and dtype into this tensor; its values have to follow."""
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied = OnDevice(self.held.clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return compute(func, args, kwargs or {})


class Rules:
    """What is watched. dtype: the model's; products by weights have to be computed in it, where it is a 16-bit one. strict:
    what may not happen now: "sync" (the host waits for the device), "host" (a tensor made on the host is sent to the device),
    "float32". known: files in which it may. counted: how often each of them happened, by the line of the library."""

    dtype: torch.dtype | None = None
    strict: frozenset[str] = frozenset()
    known: tuple[str, ...] = ()
    counted: Counter[tuple[str, str]] = Counter()

    @classmethod
    def note(cls, kind: str, name: str) -> None:
        line = where()
        cls.counted[kind, line] += 1
        if kind in cls.strict and not line.startswith(cls.known):
            raise RehearsalError(f"{name} {WORDS[kind]} ({line})")


WORDS = {
    "sync": "waits for the device",
    "host": "sends a tensor of the host to the device",
    "float32": "computes in float32 in a model of 16 bits",
}


def where() -> str:
    """The line of the library that runs now, whatever mode torch calls on its way."""
    for frame, number in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if frame.f_code.co_name != "__torch_function__" and file.startswith((f"{ROOT}/surgery/", f"{ROOT}/kernels/")):
            return f"{Path(file).relative_to(ROOT)}:{number}"
    return "elsewhere"


def compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute on the host what concerns the device, by its rules."""
    name = func._schema.name.removeprefix("aten::")
    given = [m for m in tree_leaves((args, kwargs)) if isinstance(m, Tensor)]
    ours = [m for m in given if isinstance(m, OnDevice)]
    hosts = [m for m in given if not isinstance(m, OnDevice)]
    device = kwargs.get("device")
    named = device is not None and torch.device(device).type == NAME
    if not ours and not named:
        return func(*args, **kwargs)
    if ours and reads(name, func, args):
        Rules.note("sync", name)
    copies = name in BETWEEN
    into_host = bool(ours) and ((device is not None and not named) or (copies and args and not isinstance(args[0], OnDevice)))
    if copies and into_host:
        Rules.note("sync", name)
    if copies and hosts and not into_host:
        Rules.note("host", name)
    if ours and not copies and any(m.dim() for m in hosts):
        if name not in BETWEEN_INDEXED or not isinstance(args[0], OnDevice):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME} and cpu in {name} ({where()})")
        Rules.note("host", name)
    if isinstance(generator := kwargs.get("generator"), torch.Generator) and named and generator.device.type != NAME:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device.type}' ({where()})")
    if named:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain_kwargs = tree_map(_held, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if into_host:
        return result
    _check_products(name, result)
    known = {id(m.held): m for m in ours}
    return tree_map(lambda m: _wrapped(m, known), result)


def _wrapped(m: Any, known: dict[int, OnDevice]) -> Any:
    if not isinstance(m, Tensor):
        return m
    return known[id(m)] if id(m) in known else OnDevice(m)  # what was changed in place is what was given


def reads(name: str, func: Any, args: tuple) -> bool:
    """Whether the host has to know a value before it can go on."""
    if name in BETWEEN_INDEXED:
        return any(m is not None and m.dtype == torch.bool for m in args[1])
    return name in READS or bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _held(m: Any) -> Any:
    return m.held if isinstance(m, OnDevice) else m


def _check_products(name: str, result: Any) -> None:
    small = Rules.dtype is not None and Rules.dtype.itemsize < 4
    if small and name in PRODUCTS and any(isinstance(m, Tensor) and m.dtype == torch.float32 for m in tree_leaves(result)):
        Rules.note("float32", name)


class _Mode(TorchDispatchMode):
    """Makes what is asked for on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return compute(func, args, kwargs or {})


@contextmanager
def on_device(dtype: torch.dtype | None = None) -> Iterator[type[Rules]]:
    """Within, the device is there."""
    Rules.dtype, Rules.strict, Rules.counted = dtype, frozenset(), Counter()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes a tensor on the host and moves it
    torch.__future__.set_swap_module_params_on_conversion(True)  # what is tied stays tied when a model is moved
    inference = torch._C._InferenceMode
    # A tensor of that mode has no version, which a subclass of Tensor needs; to the rehearsal it is the same as no_grad.
    torch._C._InferenceMode = lambda mode: torch.no_grad() if mode else nullcontext()
    try:
        # A backward pass in a thread of the device's own would not know the mode, and torch ends the process there.
        with _Mode(), torch.autograd.set_multithreading_enabled(False):
            yield Rules
    finally:
        torch._C._InferenceMode = inference
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(False)


__all__ = ["NAME", "OnDevice", "RehearsalError", "Rules", "on_device", "register"]
