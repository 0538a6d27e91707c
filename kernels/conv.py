"""The short causal convolution of a mixer: every channel on its own, over the last few tokens.

    y_t[c] = bias[c] + sum_i weight[c, k-1-i] x_{t-i}[c]        with nothing before the first token of a document

The mixer's projection is (b, t, channels). PyTorch's convolution has to transpose it, which takes longer than to compute.
`shifted` adds up the k shifted products without a transpose; `stock` is PyTorch's convolution, `causal_conv1d` the CUDA package
of Mamba's authors, `hub` a build of that package from the Hub.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.choose import ON_GPU, Backend, Operation, hub
from surgery.kernels.functions import is_double, on_gpu


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
    activation follows. packing: of the tokens, where several documents share a row; then s = t. On a GPU they are one call.
    """
    if not len(x) or not t:
        return x[:, x.shape[1] - t :]  # nothing; its shape alone
    if packing is None:
        return CAUSAL_CONV(x, weight, bias, None, t, silu, backend=backend)
    if on_gpu(x):
        return packing.clear(CAUSAL_CONV(x, weight, bias, packing.seq_idx, t, silu, backend=backend))
    return packing.apply(lambda rows: causal_conv(rows, weight, bias, rows.shape[1], silu, backend=backend), x)


def _shifted(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, t: int, silu: bool) -> Tensor:
    k, s, dtype, work = weight.shape[-1], x.shape[1], x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, weight, bias = x.to(work), weight.to(work), None if bias is None else bias.to(work)
    missing = max(0, t + k - 1 - s)
    x = F.pad(x, (0, 0, missing, 0)) if missing else x
    if t == 1 and seq_idx is None:  # a step of decoding: one product in the place of k
        y = (x[:, x.shape[1] - k :] * weight[:, 0].t()).sum(1, keepdim=True)
        y = y if bias is None else y + bias
        return (F.silu(y) if silu else y).to(dtype)
    taps = weight[:, 0].t().contiguous().flip(0)  # k c, the newest token's first
    newest, end = x[:, x.shape[1] - t :], x.shape[1]
    y = newest * taps[0] if bias is None else torch.addcmul(bias, newest, taps[0])
    in_place = not (torch.is_grad_enabled() and y.requires_grad)
    for i in range(1, k):
        part = x[:, end - t - i : end - i]
        if seq_idx is not None:
            part = part * (seq_idx == F.pad(seq_idx, (i, 0), value=-2)[:, :s])[..., None]
        y = y.addcmul_(part, taps[i]) if in_place else torch.addcmul(y, part, taps[i])
    return (F.silu(y, inplace=in_place) if silu else y).to(dtype)


def _stock(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: None, t: int, silu: bool) -> Tensor:
    c, _, k = weight.shape
    s = x.shape[1]
    y = F.conv1d(x.transpose(1, 2), weight, bias, padding=k - 1, groups=c)[..., s - t : s].transpose(1, 2)
    return F.silu(y) if silu else y


def _by_cuda(
    find: Callable[[], Any], x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, t: int, silu: bool
) -> Tensor:
    """By causal_conv1d_fn, wherever it is from. It wants strides of batch and tokens that are multiples of 8, and numbers that
    begin at a multiple of 16 bytes; a part of a projection may have neither, and is copied."""
    fits = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0
    x = (x if fits else x.contiguous()).transpose(1, 2)
    y = find()(x, weight[:, 0], bias, seq_idx=seq_idx, activation="silu" if silu else None)
    return y[..., x.shape[2] - t :].transpose(1, 2)


def _not_for_shifted(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, *_: object) -> str | None:
    return None if x.dtype in (torch.float32, torch.float64) else "it would compute in float32"


def _not_for_stock(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, *_: object) -> str | None:
    if x.device.type == "cpu" and x.itemsize == 2:
        return "in 16 bits it is 40 times slower on a CPU than in float32"
    return "it takes one document a row" if seq_idx is not None else None


def _not_for_cuda(x: Tensor, weight: Tensor, *_: object) -> str | None:
    if reason := is_double(x):
        return reason
    if not 2 <= weight.shape[-1] <= 4:
        return "it takes 2 to 4 taps"
    return "it takes multiples of 8 channels" if x.shape[2] % 8 else None


CAUSAL_CONV = Operation(
    "causal_conv",
    "x:bsc weight:c1k bias?:c seq_idx?:bs# t=SymInt silu=bool",
    lambda x, weight, bias, seq_idx, t, silu: [((len(x), t, x.shape[2]), x.dtype)],
    1,
    Backend(
        "causal_conv1d", partial(_by_cuda, lambda: import_module("causal_conv1d").causal_conv1d_fn), _not_for_cuda, **ON_GPU
    ),
    Backend("shifted", _shifted, _not_for_shifted, device="cpu"),  # on a GPU each of its products would be a launch
    Backend("stock", _stock, _not_for_stock),
    Backend(
        "hub",
        partial(_by_cuda, lambda: hub("mamba-ssm", 4).layers.causal_conv1d_fn().forward),
        _not_for_cuda,
        on_request=True,
        **ON_GPU,
    ),
    Backend("reference", _shifted),
)
