"""Float64 throughout, for what is exact beside float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Double(TorchFunctionMode):
    """Computes in float64 what a model asks to have in float32 whatever its own dtype: norms, scans, softmax."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        if function is torch.Tensor.view:  # which reads the same bytes as another dtype, as files are read
            return function(*args, **(kwargs or {}))
        if function is torch.empty and args == ((0,),):  # which a tensor that is unpickled puts its bytes into
            return function(*args, **(kwargs or {}))

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@contextmanager
def float64() -> Iterator[None]:
    """For two ways of computing the same: they add in different orders, and on another CPU in others again. What is made within
    is in float64, too."""
    torch.set_default_dtype(torch.float64)
    try:
        with Double():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
