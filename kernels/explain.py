"""Who serves what on this machine, at the sizes of a model, and what would help."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from surgery.kernels.attention import ATTEND
from surgery.kernels.choose import Operation
from surgery.kernels.conv import CAUSAL_CONV
from surgery.kernels.selective import SELECTIVE_SCAN, SELECTIVE_STEP
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP

Call = tuple[str, Operation, list[Any]]


@dataclass(frozen=True)
class Sizes:
    """Of a model's mixers: heads of head_dim channels and a state of `state` numbers a channel (Mamba-2), channels (Mamba-1); a
    batch of rows x tokens. As they are: mamba2-2.7b's and Falcon-Mamba-7B's."""

    heads: int = 80
    head_dim: int = 64
    state: int = 128
    channels: int = 8192
    rows: int = 2
    tokens: int = 1000


SMALL = Sizes(4, 16, 16, 64, 2, 100)


def make_calls(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[Call]:
    """(a name, the operation, arguments): every kind of call that a hybrid makes."""
    b, t, h, p, n, d = sizes.rows, sizes.tokens, sizes.heads, sizes.head_dim, sizes.state, sizes.channels

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    full = {"dtype": torch.float32}
    documents = (torch.arange(t, device=device) // (t // 3)).int().expand(b, t).contiguous()
    dt, A = 0.01 + 0.1 * torch.rand(b, t, h, device=device), -1 - torch.rand(h, device=device)
    x, B, C, D = draw(b, t, h, p), draw(b, t, 1, n), draw(b, t, 1, n), draw(h, **full)
    scan = [x, dt.to(dtype), A, B, C, D, None]
    yield "ssd_scan", SSD_SCAN, [*scan, None, 256]
    yield "ssd_scan packed", SSD_SCAN, [*scan, documents, 256]
    yield "ssd_step", SSD_STEP, [draw(b, h, p, n, **full), x[:, 0], dt[:, 0].to(dtype), A, B[:, 0], C[:, 0], D]
    wide = h * p + 2 * n
    taps = [draw(wide, 1, 4), draw(wide)]
    yield "causal_conv", CAUSAL_CONV, [draw(b, t, wide), *taps, None, t, True]
    part = draw(b, t, wide + 4)[..., 4:]  # of a projection that no package would have made
    yield "causal_conv of a part", CAUSAL_CONV, [part, *taps, None, t, True]
    yield "causal_conv packed", CAUSAL_CONV, [part, *taps, documents, t, True]
    u, step, matrix = draw(b, t, d), 0.01 + 0.1 * torch.rand(b, t, d, device=device), -1 - torch.rand(d, 16, device=device)
    channels = [u, step.to(dtype), matrix, draw(b, t, 16), draw(b, t, 16), draw(d, **full)]
    yield "selective_scan", SELECTIVE_SCAN, [*channels, None]
    one = [m[:, 0] if m.dim() == 3 else m for m in channels]
    yield "selective_step", SELECTIVE_STEP, [draw(b, d, 16, **full), *one]
    for pairs in (1, 3, h):
        q, k = (draw(b, pairs, t, n) * n**-0.25 for _ in range(2))
        v, bias, null = draw(b, pairs, t, p), dt[:, :, :pairs].log().transpose(1, 2), draw(pairs, **full)
        yield f"attend {pairs} pairs", ATTEND, [q, k, v, bias, null, None, None]
    mask = torch.arange(t, device=device).expand(b, t) > 6
    yield "attend padded", ATTEND, [q, k, v, None, null, mask, None]
    yield "attend packed", ATTEND, [q, k, v, bias, null, None, documents]
    yield "attend one query", ATTEND, [q[:, :, -1:], k, v, bias, null, None, None]
    yield "attend channels", ATTEND, [q[:, :1, :, :16], k[:, :1, :, :16], draw(b, 1, t, 10 * p), None, null[:1], None, None]


def explain(device: str | torch.device, dtype: torch.dtype, sizes: Sizes | None = None) -> list[str]:
    """A line for every kind of call, forward and with its gradient, and at last what would help. It tries the backends, which
    takes minutes where mamba_ssm tunes its kernels for the first time."""
    device, lines, missing = torch.device(device), [], set()
    sizes = Sizes() if sizes is None else sizes
    for name, operation, args in make_calls(device, dtype, sizes):
        served = []
        for learning in (False, True) if operation.differentiable else (False,):
            own = [
                m.detach().requires_grad_(learning) if isinstance(m, torch.Tensor) and m.is_floating_point() else m
                for m in args
            ]
            served.append(operation.choose(*own).name)
            missing |= {
                backend
                for backend, reason in operation.explain(*own).items()
                if reason and "ModuleNotFoundError" in reason and not operation.backends[backend].on_request
            }
        lines.append(f"{name}: {served[0]}" + (f", and {served[1]} with its gradient" if len({*served}) > 1 else ""))
    return [*lines, *advise(device, missing)]


def advise(device: torch.device, missing: set[str]) -> list[str]:
    """One command that would help here, if there is one."""
    if device.type != "cuda":
        return []
    here = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version_info[0]}.{sys.version_info[1]}"
    if "mamba_ssm" in missing:
        command = "MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps mamba-ssm && pip install einops"
        return [f"faster scans ({here}; it compiles nothing): {command}"]
    if "causal_conv1d" in missing:
        return [
            f"a faster convolution ({here}): pip install kernels, and SURGERY_KERNELS=causal_conv=hub (it downloads a build)"
        ]
    return []
