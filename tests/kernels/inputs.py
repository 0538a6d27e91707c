"""Random arguments of the kernels, and how far two results are apart."""

from typing import Any

import torch
from torch import Tensor


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def ssd(
    b: int = 2, t: int = 150, h: int = 4, p: int = 16, g: int = 2, n: int = 16, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """x, dt, A, B, C, D and an initial state."""
    dt = 0.01 + 0.1 * randn(b, t, h).abs()
    rest = randn(b, t, g, n, dtype=dtype), randn(b, t, g, n, dtype=dtype, seed=1), randn(h), randn(b, h, p, n)
    return [randn(b, t, h, p, dtype=dtype), dt.to(dtype), -1 - randn(h).abs(), *rest]


def selective(b: int = 2, t: int = 150, d: int = 24, n: int = 16, dtype: torch.dtype = torch.float32) -> list[Any]:
    """x, dt, A, B, C, D and an initial state."""
    dt = 0.01 + 0.1 * randn(b, t, d, seed=2).abs()
    rest = randn(b, t, n, dtype=dtype), randn(b, t, n, dtype=dtype, seed=1), randn(d), randn(b, d, n)
    return [randn(b, t, d, dtype=dtype), dt.to(dtype), -1 - randn(d, n).abs(), *rest]


def attention(
    b: int = 2, h: int = 2, t: int = 70, s: int = 70, w: int = 24, p: int = 20, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """q, k, v, bias and null."""
    return {
        "q": randn(b, h, t, w, dtype=dtype),
        "k": randn(b, h, s, w, dtype=dtype, seed=1),
        "v": randn(b, h, s, p, dtype=dtype),
        "bias": randn(b, h, s, dtype=dtype),
        "null": 1 + randn(h, dtype=dtype),
    }


def with_gradients(run: Any, args: list[Any], exact: bool = False) -> list[Tensor]:
    """What `run` gives, and the gradients of a fixed sum of it by each tensor of floating point. exact: all in float64."""
    leaves = [
        (m.double() if exact else m).detach().clone().requires_grad_() if isinstance(m, Tensor) and m.is_floating_point() else m
        for m in args
    ]
    results = run(*leaves)
    results = [results] if isinstance(results, Tensor) else [m for m in results if m is not None]
    total = sum((m.double() * randn(*m.shape, dtype=torch.float64).to(m.device)).sum() for m in results)
    inputs = [m for m in leaves if isinstance(m, Tensor) and m.requires_grad]
    return [*results, *torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)]


def distance(result: Tensor, truth: Tensor) -> float:
    """The norm of the difference over the norm of the truth."""
    assert result.shape == truth.shape
    difference = (result.detach().double().cpu() - truth.detach().double().cpu()).norm()
    return (difference / truth.detach().double().norm().cpu().clamp_min(1e-12)).item()
