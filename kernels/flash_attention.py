"""Graft attention by FlashAttention, where it is installed: flash-attn 2 and 3, and builds of both from the Hugging Face Hub.

FlashAttention wants heads of one width, a multiple of 8 up to 256. A query-key pair of a sequence becomes an entry of the
batch; queries, keys and values are padded with zeros, which changes no score; and a value wider than a head is cut into pieces,
which are heads with the same query and key (expanded, not copied). What that wastes is compared with what our Triton kernel
computes, and where it is too much these backends serve only if they are asked for by name.

No package is imported before a call needs it.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.dispatch import Backend
from surgery.kernels.functions import capability, traced, transformed
from surgery.kernels.triton_attention import blocks

# Columns of queries and values for which the kernels are compiled; others are computed as the next of them.
WIDTHS = (32, 64, 96, 128, 192, 256)
HUB = {2: "kernels-community/flash-attn2", 3: "kernels-community/flash-attn3"}


class Cut(NamedTuple):
    """How a call is presented: the padded widths of a query and of a piece of the value, and the number of pieces."""

    query: int
    value: int
    pieces: int

    def work(self, version: int) -> int:
        """Columns computed for every score."""
        least = 64 if version == 3 else 32
        return self.pieces * sum(max(least, x if x > 256 else min(n for n in WIDTHS if n >= x)) for x in self[:2])


@cache
def cut(w: int, dv: int, differ: bool = False) -> Cut:
    """The cheapest presentation. differ: the value's width may be another (FlashAttention-3, forward: queries of 129-192 with
    values of 97-128, and queries up to 64 with values up to 512). Expects w <= 256."""
    query = _eights(w)
    cuts = []
    for pieces in range(1, _eights(dv) // 8 + 1):
        piece = _eights(-(-dv // pieces))
        if (both := max(query, piece)) <= 256:
            cuts.append(Cut(both, both, pieces))
        if differ and 128 < query <= 192 and piece <= 128:
            cuts.append(Cut(query, max(piece, 104), pieces))
        if differ and query <= 64 and piece <= 512:
            cuts.append(Cut(query, piece, pieces))
    return min(cuts, key=lambda c: (c.work(3 if differ else 2), c))


def attend(
    dense: Callable[..., Any], varlen: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, c: Cut
) -> Tensor:
    """By FlashAttention's functions for whole batches and for packed sequences. Arguments and result as in graft attention."""
    (b, pairs, t, w), s, dv = q.shape, k.shape[2], v.shape[3]
    options = {"softmax_scale": 1.0, "causal": True, "deterministic": torch.are_deterministic_algorithms_enabled()}

    def heads(x: Tensor, width: int) -> Tensor:  # (b, pairs, n, w) -> (b * pairs, n, pieces, width), stride 0 over the pieces
        return _aligned(F.pad(x, (0, width - w)) if width > w else x).flatten(0, 1)[:, :, None].expand(-1, -1, c.pieces, -1)

    q, k = heads(q, c.query), heads(k, c.query)
    v = F.pad(v, (0, extra)) if (extra := c.pieces * c.value - dv) else v
    v = _aligned(v).unflatten(-1, (c.pieces, c.value)).flatten(0, 1)
    if mask is None:
        y = _first(dense(q, k, v, **options))
    else:  # packed: queries and keys that exist, sequence after sequence, the last query aligned to the last key as before
        keys = mask[:, None].expand(b, pairs, s).flatten(0, 1)
        queries = keys[:, s - t :]
        lengths = (F.pad(x.sum(1).cumsum(0, dtype=torch.int32), (1, 0)) for x in (queries, keys))
        packed = _first(varlen(q[queries], k[keys], v[keys], *lengths, t, s, **options))
        y = packed.new_zeros(b * pairs, t, c.pieces, c.value)
        y[queries] = packed
    return y.flatten(2)[..., :dv].unflatten(0, (b, pairs))


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy whose rows start where the kernels' loads of eight numbers may."""
    fits = x.stride(-1) == 1 and not any(step % 8 for step in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result  # early builds of version 3 return the log-sum-exp too


def _eights(n: int) -> int:
    return n + -n % 8


def _refuses(version: int, package: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    return next(_objections(version, package, q, k, v, mask), None)


def _objections(version: int, package: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[str]:
    if q.device.type != "cuda":
        yield "it needs a GPU"
    if reason := transformed():
        yield reason
    if not _installed(package):
        yield f"the package {package} is not installed"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        yield "it takes bfloat16 or float16, the same for queries, keys and values"
    if q.shape[-1] > 256:
        yield "queries and keys are wider than 256"
    if not 0 < q.shape[2] <= k.shape[2]:
        yield "it needs a query, and a key for every query"
    if q.shape[0] * q.shape[1] > 65535:
        yield "there are more than 65535 sequences and pairs"
    major = capability(q.device)[0]
    if major < 8 or (version == 3 and major != 9):
        yield "it needs compute capability " + ("9" if version == 3 else "8 or more")
    if mask is not None and (mask.dim() != 2 or mask.dtype != torch.bool):
        yield "its mask says which keys exist: boolean, (batch, keys)"
    if mask is not None and q.shape[2] == 1:
        yield "packing its keys would make every step of decoding wait for the GPU"
    if mask is not None and traced(mask):
        yield "its mask cannot be looked at in a trace"
    if mask is not None and (mask[:, 1:] < mask[:, :-1]).any():  # waits for the GPU, as packing does anyway
        yield "its mask may be padding on the left only"  # a query in a hole would see nothing


@cache
def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a plain folder named `kernels` in the working directory has none


def _declines(version: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """From first principles, until tools/bench_attention.py says otherwise: FlashAttention-2 and a Triton kernel reach much
    the same rate, FlashAttention-3 one and a half times that (arXiv 2407.08608), so the one may waste next to nothing and the
    other half as much again. Queries of 129 are computed as 192 there and as 144 here, and a value of 64 as 192 and as 64; what
    fits FlashAttention are queries and values of one of its widths, and, with version 3 in a forward pass, 129 beside 128."""
    w, dv = q.shape[-1], v.shape[-1]
    if w > 256:
        return None  # it refuses
    c = _cut(version, q, k, v)
    if q.shape[2] < 64 and (c.query, c.pieces * c.value) != (w, dv):
        return "padding the keys would cost more than the attention of a few queries"
    w1, w2, block = blocks(w, dv)
    ours = -(-dv // block) * (w1 + w2 + block)
    theirs = c.work(version)
    return (
        f"it would compute {theirs} columns a score, Triton {ours}" if theirs > ours * (1.5 if version == 3 else 1.1) else None
    )


def _cut(version: int, q: Tensor, k: Tensor, v: Tensor) -> Cut:
    # Its backward pass computes both widths as the larger one, and before 2025 demanded that they be equal.
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return cut(q.shape[-1], v.shape[-1], version == 3 and not trained)


def _from_package(version: int, package: str) -> Backend:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        module = importlib.import_module(package)
        return attend(module.flash_attn_func, module.flash_attn_varlen_func, q, k, v, mask, _cut(version, q, k, v))

    return Backend(
        f"flash{version}",
        run,
        refuses=lambda *call: _refuses(version, package, *call),
        declines=lambda *call: _declines(version, *call),
        probed=True,
        opaque=True,
    )


@cache
def _download(version: int) -> Any:
    # The fourth version of the builds of FlashAttention-2 is for torch since 2.10.
    old_torch = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 10)
    build = 1 if version == 3 else 3 if old_torch else 4
    return importlib.import_module("kernels").get_kernel(HUB[version], version=build)


def _hub(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    version = 3 if torch.cuda.get_device_capability(q.device)[0] == 9 else 2
    module = _download(version)
    return attend(module.flash_attn_func, module.flash_attn_varlen_func, q, k, v, mask, _cut(version, q, k, v))


BACKENDS = (
    _from_package(3, "flash_attn_interface"),
    _from_package(2, "flash_attn"),
    # On request only: nothing is downloaded silently.
    Backend("hub", _hub, refuses=lambda *call: _refuses(2, "kernels", *call), probed=True, on_request=True, opaque=True),
)
