"""Who serves what on this machine, at the sizes of a model, and what would help."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from surgery.kernels.attention import ATTEND
from surgery.kernels.choose import Operation
from surgery.kernels.conv import CAUSAL_CONV
from surgery.kernels.functions import on_gpu
from surgery.kernels.selective import SELECTIVE_SCAN, SELECTIVE_STEP
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP

Call = tuple[str, Operation, list[Any]]


@dataclass(frozen=True)
class Sizes:
    """Of a model's mixers: heads of head_dim values, with keys and queries of `state` numbers in groups (Mamba-2, or with
    `delta` the gated delta rule); channels with states of channel_state numbers (Mamba-1). 0: it has none. A batch of rows x
    tokens. As they are: mamba2-2.7b's and Falcon-Mamba-7B's."""

    heads: int = 80
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    delta: bool = False
    channels: int = 8192
    channel_state: int = 16
    rows: int = 2
    tokens: int = 1000


SMALL = Sizes(4, 16, 16, channels=64, tokens=100)


@dataclass(frozen=True)
class Served:
    """A kind of call, the backend that serves it, the one that serves it where gradients are wanted (None: there are none), and
    why backends that would come first do not. alone: whether each document of a packed row is a call of its own."""

    call: str
    forward: str
    learning: str | None
    reasons: dict[str, str]
    alone: bool = False

    def __str__(self) -> str:
        serves = self.forward + (f", with its gradient {self.learning}" if self.learning not in (None, self.forward) else "")
        serves += ", a document at a time" if self.alone else ""
        why = "; ".join(f"not {name}: {reason}" for name, reason in self.reasons.items())
        return f"{self.call:<24}{serves:<10}  {why}".rstrip()


def make_calls(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[Call]:
    """(a name, the operation, arguments): every kind of call that a hybrid makes."""
    b, t, h, p, n, g = sizes.rows, sizes.tokens, sizes.heads, sizes.head_dim, sizes.state, sizes.groups
    d, m = sizes.channels, sizes.channel_state
    n = n if h else m

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    full = {"dtype": torch.float32}
    documents = (torch.arange(t, device=device) // (t // 3)).int().expand(b, t).contiguous()
    dt, A = 0.01 + 0.1 * torch.rand(b, t, h or 1, device=device), -1 - torch.rand(h, device=device)
    if h and not sizes.delta:
        x, B, C, D = draw(b, t, h, p), draw(b, t, g, n), draw(b, t, g, n), draw(h, **full)
        scan = [x, dt.to(dtype), A, B, C, D, None]
        yield "ssd_scan", SSD_SCAN, [*scan, None, 256]
        yield "ssd_scan packed", SSD_SCAN, [*scan, documents, 256]
        yield "ssd_step", SSD_STEP, [draw(b, h, p, n, **full), x[:, 0], dt[:, 0].to(dtype), A, B[:, 0], C[:, 0], D]
    wide = h * p + 2 * g * n if h else d
    taps = [draw(wide, 1, 4), draw(wide)]
    yield "causal_conv", CAUSAL_CONV, [draw(b, t, wide), *taps, None, t, True]
    part = draw(b, t, wide + 4)[..., 4:]  # of a projection that no package would have made
    yield "causal_conv of a part", CAUSAL_CONV, [part, *taps, None, t, True]
    yield "causal_conv packed", CAUSAL_CONV, [part, *taps, documents, t, True]
    if d:
        u, step, matrix = draw(b, t, d), 0.01 + 0.1 * torch.rand(b, t, d, device=device), -1 - torch.rand(d, m, device=device)
        channels = [u, step.to(dtype), matrix, draw(b, t, m), draw(b, t, m), draw(d, **full)]
        yield "selective_scan", SELECTIVE_SCAN, [*channels, None]
        one = [each[:, 0] if each.dim() == 3 else each for each in channels]
        yield "selective_step", SELECTIVE_STEP, [draw(b, d, m, **full), *one]
    for pairs in sorted({1, min(3, h), h} - {0}) or (1,):
        q, k = (draw(b, pairs, t, n) * n**-0.25 for _ in range(2))
        v, bias, null = draw(b, pairs, t, p), dt[:, :, :pairs].log().transpose(1, 2), draw(pairs, **full)
        yield f"attend {pairs} pairs", ATTEND, [q, k, v, bias, null, None, None]
    mask = torch.arange(t, device=device).expand(b, t) > 6
    yield "attend padded", ATTEND, [q, k, v, None, null, mask, None]
    yield "attend packed", ATTEND, [q, k, v, bias, null, None, documents]
    yield "attend one query", ATTEND, [q[:, :, -1:], k, v, bias, null, None, None]
    if d:
        yield "attend channels", ATTEND, [q[:, :1, :, :m], k[:, :1, :, :m], draw(b, 1, t, 10 * p), None, null[:1], None, None]


def explain(device: str | torch.device, dtype: torch.dtype, sizes: Sizes | None = None) -> tuple[list[Served], list[str]]:
    """(who serves every kind of call, what would help). It tries the backends, which takes minutes where mamba_ssm tunes its
    kernels for the first time."""
    device, rows, missing = torch.device(device), [], set()
    for call, operation, given in make_calls(device, dtype, Sizes() if sizes is None else sizes):
        alone = call.endswith("packed")
        if alone and on_gpu(given[0]):  # as ssd_scan, causal_conv and attend decide it
            alone = operation is not CAUSAL_CONV and operation.choose(*given).name in ("reference", "plain")
        args = [None if alone and isinstance(m, torch.Tensor) and m.dtype == torch.int32 else m for m in given]
        served: list[str] = []
        reasons: dict[str, str] = {}
        for learning in (False, True) if operation.differentiable else (False,):
            own = [
                m.detach().requires_grad_(learning) if isinstance(m, torch.Tensor) and m.is_floating_point() else m
                for m in args
            ]
            served.append(operation.choose(*own).name)
            for backend in operation.backends.values():
                if backend.name == served[-1]:
                    break
                if not backend.on_request:
                    reasons[backend.name] = operation.why_not(backend, *own) or reasons.get(backend.name, "")
        lacks = {backend for backend, reason in reasons.items() if "ModuleNotFoundError" in reason or "no C compiler" in reason}
        # Of mamba_ssm the scan of Mamba-1 needs what has to be compiled.
        missing |= {"selective_scan"} if operation is SELECTIVE_SCAN and "mamba_ssm" in lacks else lacks
        rows.append(Served(call, served[0], served[1] if len(served) > 1 else None, reasons, alone))
    return rows, advise(device, missing)


def advise(device: torch.device, missing: set[str]) -> list[str]:
    """One command that would help here, if there is one. missing: backends for which something is not installed."""
    if device.type == "cpu" and "native" in missing:
        return ["faster scans on this processor: install a C compiler (cc), e.g. apt install gcc"]
    if device.type == "cuda" and "mamba_ssm" in missing:
        command = "MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps mamba-ssm && pip install einops"
        return [f"faster scans (it compiles nothing): {command}"]
    if device.type == "cuda" and "selective_scan" in missing:
        return ["a faster scan: pip install kernels, and SURGERY_KERNELS=selective_scan=hub (it downloads a build)"]
    if device.type == "cuda" and "causal_conv1d" in missing:
        return ["a faster convolution: pip install kernels, and SURGERY_KERNELS=causal_conv=hub (it downloads a build)"]
    return []
