"""The root mean square norm of a block, and the gated one of a Mamba-2 mixer.

    y = weight v / sqrt(mean(v^2) + eps),    v = x silu(gate)

with the mean over each group of neighbouring channels. Computed in float32 and rounded before the weight is applied, as in
transformers. `mamba_ssm` is the CUDA package of Mamba's authors, `native` (conv_norm.c) is ours, in C for a CPU, `stock`
repeats the steps of transformers, and `reference` computes in the dtype that it is given.
"""

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.conv_norm_native import norm_refuses, normalise
from surgery.kernels.dispatch import Backend, Operation, not_for_cuda_package
from surgery.kernels.functions import seeded
from surgery.kernels.operators import Signature


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, group: int | None = None, *, backend: str | None = None
) -> Tensor:
    """x (..., t, c) and gate, likewise; weight (c,); `group` divides c and is c unless given. Returns (..., t, c)."""
    return RMS_NORM(x, weight, eps, gate, group or x.shape[-1], backend=backend)


def _stock(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> Tensor:
    v = x.to(torch.float32)
    if gate is not None:
        v = v * F.silu(gate.to(torch.float32))
    return weight * _scaled(v, eps, group).to(x.dtype)


def _reference(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> Tensor:
    return weight * _scaled(x if gate is None else x * F.silu(gate), eps, group)


def _scaled(v: Tensor, eps: float, group: int) -> Tensor:
    grouped = v.unflatten(-1, (-1, group))
    return (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)


def _mamba_ssm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group: int) -> Tensor:
    norm = import_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn
    return norm(x, weight, None, z=gate, eps=eps, group_size=group, norm_before_gate=False)


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    options = seeded()
    x, gate, weight = (torch.randn(*shape, **options).to(device, dtype) for shape in ((1, 8, 64), (1, 8, 64), (64,)))
    return x, weight, 1e-5, gate, 32


RMS_NORM = Operation(
    "rms_norm",
    Backend("mamba_ssm", _mamba_ssm, not_for_cuda_package, probed=True, opaque=True),
    Backend("native", normalise, norm_refuses, probed=True, opaque=True),
    Backend("stock", _stock),
    Backend("reference", _reference),
    example=_example,
    signature=Signature(
        ("Tensor x", "Tensor weight", "float eps", "Tensor? gate", "SymInt group"),
        1,
        lambda x, weight, *rest: [(x.shape, torch.promote_types(x.dtype, weight.dtype))],
    ),
)
