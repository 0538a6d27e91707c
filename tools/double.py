"""Float64 throughout, for what is exact beside float32."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Double(TorchFunctionMode):
    """Computes in float64 what a model asks to have in float32 whatever its own dtype: norms, scans, softmax."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})
