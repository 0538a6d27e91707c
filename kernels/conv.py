"""The short causal convolution of a mixer: every channel on its own, over the last few tokens.

    y_t[c] = bias[c] + sum_i weight[c, k-1-i] x_{t-i}[c]        with nothing before the first token

The mixer's projection is (b, t, channels). PyTorch's convolution has to transpose it, which takes longer than to compute.
`shifted` adds up the k shifted products without a transpose; `stock` is
PyTorch's convolution, `causal_conv1d` the CUDA package of Mamba's authors.
"""

from importlib import import_module

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.dispatch import Backend, Operation
from surgery.kernels.functions import seeded
from surgery.kernels.operators import Signature

SILU = ("silu", "swish")  # what configs call that activation


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    t: int,
    silu: bool = False,
    *,
    packing: Any = None,
    backend: str | None = None,
) -> Tensor:
    """The last t tokens' outputs, (b, t, c).

    x (b, s, c), s >= t: tokens before the last t are context. weight (c, 1, k), as in Conv1d; bias (c,). silu: whether that
    activation follows. packing: of the tokens, where several documents share a row; then s = t.
    """
    if packing is not None:
        return packing.apply(lambda rows: causal_conv(rows, weight, bias, rows.shape[1], silu, backend=backend), x)
    if not len(x) or not t:
        return x[:, x.shape[1] - t :]  # nothing; its shape alone
    return CAUSAL_CONV(x, weight, bias, t, silu, backend=backend)


def _shifted(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> Tensor:
    k = weight.shape[-1]
    missing = max(0, t + k - 1 - x.shape[1])
    x = F.pad(x, (0, 0, missing, 0)) if missing else x
    parts = [x[:, x.shape[1] - t - i : x.shape[1] - i] for i in range(k)]
    taps = weight[:, 0].t().contiguous().flip(0)  # k c, the newest token's first
    y = parts[0] * taps[0] if bias is None else torch.addcmul(bias, parts[0], taps[0])
    in_place = not (torch.is_grad_enabled() and y.requires_grad)
    for part, tap in zip(parts[1:], taps[1:], strict=True):
        y = y.addcmul_(part, tap) if in_place else torch.addcmul(y, part, tap)
    return F.silu(y, inplace=in_place) if silu else y


def _stock(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> Tensor:
    c, _, k = weight.shape
    s = x.shape[1]
    y = F.conv1d(x.transpose(1, 2), weight, bias, padding=k - 1, groups=c)[..., s - t : s].transpose(1, 2)
    return F.silu(y) if silu else y


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> Tensor:
    s, k = x.shape[1], weight.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = [wide[:, max(0, i - k + 1) : i + 1] for i in range(s - t, s)]
    y = torch.stack([(row * weight[:, 0, k - row.shape[1] :].t()).sum(1) for row in rows], 1)
    y = y if bias is None else y + bias
    return (F.silu(y) if silu else y).to(x.dtype)


def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, t: int, silu: bool) -> Tensor:
    function = import_module("causal_conv1d").causal_conv1d_fn
    y = function(x.transpose(1, 2), weight[:, 0], bias, activation="silu" if silu else None)
    return y[..., x.shape[1] - t :].transpose(1, 2)


def _not_for_shifted(x: Tensor, *_: object) -> str | None:
    if x.device.type != "cpu":
        return "it is for CPUs: on a GPU each of its products would be a launch"
    return None if x.dtype in (torch.float32, torch.float64) else "it would round after every product"


def _not_for_causal_conv1d(x: Tensor, weight: Tensor, *_: object) -> str | None:
    if x.device.type != "cuda":
        return "it runs on CUDA devices"
    return None if 2 <= weight.shape[-1] <= 4 and x.dtype != torch.float64 else "it takes 2 to 4 taps, and no float64"


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    options = seeded()
    x, weight, bias = (torch.randn(*shape, **options).to(device, dtype) for shape in ((2, 12, 16), (16, 1, 4), (16,)))
    return x, weight, bias, 10, True


CAUSAL_CONV = Operation(
    "causal_conv",
    Backend("causal_conv1d", _causal_conv1d, _not_for_causal_conv1d, probed=True, opaque=True),
    Backend("shifted", _shifted, _not_for_shifted),
    Backend("stock", _stock),
    Backend("reference", _reference),
    example=_example,
    signature=Signature(
        ("Tensor x", "Tensor weight", "Tensor? bias", "SymInt t", "bool silu"),
        1,
        lambda x, weight, bias, t, silu: [((len(x), t, x.shape[2]), x.dtype)],
    ),
)
