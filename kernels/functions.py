"""What the kernels here have in common: they choose their precision themselves, and torch.func cannot transform them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

TRACED = (FakeTensor, FunctionalTensor)


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a scan's result: that of x, but float32 for float16, whose range a long sum soon exceeds."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def own_precision(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast within, for the type of device of x.

    Autocast is on in a forward pass and usually off in the backward pass of it, and may be the other way round. A backward pass
    that computes something again has to do it in the precision of the first time.
    """
    device = x.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if autocasts else nullcontext()


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """What a backend gives, one tensor or several, as several."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


def learns(*tensors: Tensor | None) -> bool:
    """Whether any of these needs a gradient."""
    return torch.is_grad_enabled() and any(m is not None and m.requires_grad for m in tensors)


def transformed(*_: object) -> str | None:
    """Why no kernel with a gradient of its own takes a call now, or None: torch.func and forward-mode derivatives need more
    than a backward pass."""
    return "torch.func cannot transform it" if torch._C._are_functorch_transforms_active() else in_forward_mode()


def in_forward_mode(*_: object) -> str | None:
    """Why no kernel without a forward-mode derivative takes a call now, or None."""
    return "it has no forward-mode derivative" if forward_ad._current_level >= 0 else None


def is_double(x: Tensor, *_: object) -> str | None:
    """Why a kernel that computes in float32 does not take x, or None."""
    return "it computes in float32" if x.dtype == torch.float64 else None


def step_not_for_triton(state: Tensor, x: Tensor, *_: object) -> str | None:
    """Why Mamba's kernels for one token do not take a call, or None."""
    return is_double(x)


def on_gpu(x: Tensor) -> bool:
    """Whether x is on a GPU that CUDA (or ROCm) drives."""
    return x.device.type == "cuda"


def is_exact(x: Tensor) -> bool:
    """Whether products of x are to be computed in float32, and not be rounded to TensorFloat-32."""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def traced(*tensors: object) -> bool:
    """Whether a call is looked at instead of computed (torch.compile, torch.export, FakeTensorMode)."""
    if torch.compiler.is_compiling() or any(isinstance(m, TRACED) for m in tensors):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(key) is not None for key in torch._C._TorchDispatchModeKey.__members__.values()
    )
