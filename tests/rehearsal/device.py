"""The device of a GPU that is none; what its tensors hold is in values.py.

PyTorch without CUDA ends the process when autograd meets a tensor on `cuda`. So the device is PyTorch's slot for others
(privateuse1), with the guards that it brings for devices in Python. It belongs to the whole process, whose every "is there an
accelerator?" it changes: rehearse in a process of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

NAME = "rehearsed"
PRODUCTS = {"mm", "addmm", "mv", "addmv", "linear", "convolution"}  # by weights
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}


class RehearsalError(AssertionError):
    """What would go wrong, or be slow, on a real GPU."""


def register() -> None:
    """Make the device known; once in a process."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Module(_DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

    _setup_privateuseone_for_python_backend(NAME, Module())
    _register_autocast()


LOWERED = "mm mv bmm addmm addmv baddbmm addbmm linear matmul conv1d conv2d scaled_dot_product_attention prelu".split()
_libraries: list[torch.library.Library] = []  # what they register ends with them


def _register_autocast() -> None:
    """As CUDA's: products are computed in autocast's dtype, all else as it is."""
    key = torch._C.DispatchKey.AutocastPrivateUse1
    everything, aten = (torch.library.Library(name, "IMPL", key.name) for name in ("_", "aten"))
    everything.fallback(torch.library.fallthrough_kernel)
    _libraries.extend((everything, aten))

    def lowered(operation: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(NAME)
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return operation(*tree_map(lambda m: _cast(m, dtype), args), **tree_map(lambda m: _cast(m, dtype), kwargs))

        return run

    for name in LOWERED:
        packet = getattr(torch.ops.aten, name)
        aten.impl(name, lowered(packet.default))


def _cast(m: Any, dtype: torch.dtype) -> Any:
    return m.to(dtype) if isinstance(m, Tensor) and m.is_floating_point() and m.device.type == NAME else m
