"""A GPU that is none: tensors know their device, shape and dtype, and have no values.

PyTorch without CUDA ends the process when autograd meets a tensor on `cuda`, even one of FakeTensorMode. So the device is
PyTorch's slot for others (privateuse1), with the guards that it brings for devices in Python. It belongs to the whole process,
whose every "is there an accelerator?" it changes: rehearse in a process of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAME = "rehearsed"
PRODUCTS = {"mm", "addmm", "mv", "addmv", "linear", "convolution"}  # by weights
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}


class _Mode(FakeTensorMode):
    avoid_device_init = True  # torch.tensor makes a tensor on the host and moves it, as for a GPU that is not there


class RehearsalError(AssertionError):
    """What would go wrong, or be slow, on a real GPU."""


def register() -> None:
    """Make the device known; once in a process."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Module(_DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

    _setup_privateuseone_for_python_backend(NAME, Module())


class Watch(TorchDispatchMode):
    """Looks at every operation. dtype: the model's; products by its weights have to be computed in it. decoding: whether no
    tensor may be made on the host, as in a step of decoding."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.device, self.dtype, self.decoding = torch.device(NAME), dtype, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in READS or torch.Tag.data_dependent_output in func.tags:
            raise RehearsalError(f"{name} waits for the device")
        given = [m for m in tree_leaves((args, kwargs)) if isinstance(m, Tensor)]
        result = func(*args, **(kwargs or {}))
        results = [m for m in tree_leaves(result) if isinstance(m, Tensor)]
        if any(m.device.type == NAME for m in given) and any(m.device.type == "cpu" for m in results):
            raise RehearsalError(f"{name} copies from the device to the host")
        if self.decoding and any(m.device.type == "cpu" for m in results):
            raise RehearsalError(f"{name} makes a tensor on the host")
        if name in PRODUCTS and self.dtype.itemsize < 4 and any(m.dtype == torch.float32 for m in results):
            raise RehearsalError(f"{name} computes in float32 in a model of {self.dtype}")
        return result


@contextmanager
def rehearsed(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[Watch]:
    """Within, the model's weights are on the device, in `dtype`, without values, and everything is watched. Raises
    RehearsalError, or PyTorch's own error for tensors on two devices."""
    watch, mode = Watch(dtype), _Mode()
    kept = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    with mode:
        for module, parameters, buffers in kept:
            for name, p in parameters.items():
                if p is not None:
                    empty = torch.empty(p.shape, dtype=dtype, device=watch.device)
                    module._parameters[name] = torch.nn.Parameter(empty, requires_grad=p.requires_grad)
            for name, m in buffers.items():
                if m is not None:
                    kind = dtype if m.is_floating_point() else m.dtype
                    module._buffers[name] = torch.empty(m.shape, dtype=kind, device=watch.device)
        try:
            with watch:
                yield watch
        finally:
            for module, parameters, buffers in kept:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
