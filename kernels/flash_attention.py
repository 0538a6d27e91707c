"""Graft attention by FlashAttention, where it is installed: versions 2, 3 and 4, and builds of 2 and 3 from Hugging Face's Hub.

FlashAttention wants heads of certain widths, multiples of 8, and those of queries and values may differ in few of its versions
(`takes`). A query-key pair of a sequence becomes an entry of the batch; queries, keys and values are padded with zeros, which
changes no score; and a value wider than a head is cut into pieces, which are heads with the same query and key (expanded, not
copied). What that wastes is compared with what flex_attention computes, and where it is too much these backends serve only if
they are asked for by name.

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
from surgery.kernels.flex_attention import WIDEST, columns
from surgery.kernels.functions import capability, learns, on_gpu, traced, transformed

# Columns of queries and values for which the kernels are compiled; others are computed as the next of them.
WIDTHS = (32, 64, 96, 128, 192, 256)
HUB = {2: "kernels-community/flash-attn2", 3: "kernels-community/flash-attn3"}
# By version: the major compute capabilities on which it has a forward and a backward pass; None: 8 and all later ones.
CAPABILITIES: dict[int, tuple[int, ...] | None] = {2: None, 3: (9,), 4: (9, 10, 11)}


class Kind(NamedTuple):
    """Which kernels would serve a call. major: of the compute capability. trained: whether a backward pass follows."""

    version: int
    major: int = 9
    trained: bool = False


SECOND = Kind(2)


class Cut(NamedTuple):
    """How a call is presented: the padded widths of a query and of a piece of the value, and the number of pieces."""

    query: int
    value: int
    pieces: int

    def work(self, version: int) -> int:
        """Columns computed for every score."""
        return self.pieces * sum(_computed(version, x) for x in self[:2])


def takes(kind: Kind, query: int, value: int) -> bool:
    """Whether there are kernels for these widths, multiples of 8: as the packages say (flash-attn 2.8.3, flash_attn_interface
    of FlashAttention-3, flash-attn-4 4.0.0b36)."""
    if kind.version == 4 and kind.major >= 10:
        return max(query, value) <= 128 or (query, value) in {(192, 128), (256, 256)}
    if kind.version == 4 or query == value:
        return max(query, value) <= 256
    if kind.version == 3 and not kind.trained:  # its backward pass computes both as the larger one, and once refused
        return (128 < query <= 192 and 96 < value <= 128) or (query <= 64 and value <= 512)
    return False


@cache
def cut(w: int, dv: int, kind: Kind = SECOND) -> Cut:
    """The cheapest presentation. Expects w <= 256."""
    least = _eights(w)
    cuts = []
    for pieces in range(1, _eights(dv) // 8 + 1):
        piece = _eights(-(-dv // pieces))
        for query in {least, max(least, piece), max(least, 192), 256}:
            values = {n for n in (piece, query, 104, 128, 256) if n >= piece}
            cuts += [Cut(query, value, pieces) for value in values if takes(kind, query, value)]
    return min(cuts, key=lambda c: (c.work(kind.version), c))


def _computed(version: int, width: int) -> int:
    """Columns that the kernels compute for a width."""
    if version == 4:  # compiled for every width when it is first met
        return width + -width % 16
    least = 64 if version == 3 else 32
    return max(least, width if width > 256 else min(n for n in WIDTHS if n >= width))


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
        begins, begins_k = (F.pad(x.sum(1).cumsum(0, dtype=torch.int32), (1, 0)) for x in (queries, keys))
        # By name: the versions have them in other places.
        lengths = {"cu_seqlens_q": begins, "cu_seqlens_k": begins_k, "max_seqlen_q": t, "max_seqlen_k": s}
        packed = _first(varlen(q[queries], k[keys], v[keys], **lengths, **options))
        y = packed.new_zeros(b * pairs, t, c.pieces, c.value)
        y[queries] = packed
    return y.flatten(2)[..., :dv].unflatten(0, (b, pairs))


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy whose rows start where the kernels' loads of eight numbers may."""
    fits = x.stride(-1) == 1 and not any(step % 8 for step in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result  # version 4, and early builds of 3: the log-sum-exp too


def _eights(n: int) -> int:
    return n + -n % 8


def _refuses(version: int, package: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    return next(_objections(version, package, q, k, v, mask), None)


def _objections(version: int, package: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[str]:
    if not on_gpu(q):
        yield "it needs a GPU"
    if reason := transformed():
        yield reason
    if not _installed(package):
        yield f"the package {package} is not installed"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        yield "it takes bfloat16 or float16, the same for queries, keys and values"
    if q.shape[-1] > WIDEST:
        yield f"queries and keys are wider than {WIDEST}"
    if not 0 < q.shape[2] <= k.shape[2]:
        yield "it needs a query, and a key for every query"
    if q.shape[0] * q.shape[1] > 65535:
        yield "there are more than 65535 sequences and pairs"
    major, served = capability(q.device)[0], CAPABILITIES[version]
    if major < 8 or (served is not None and major not in served):
        yield "it needs compute capability " + ("8 or more" if served is None else " or ".join(map(str, served)))
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
    try:  # version 4 lives in the folder of version 2, which is imported, and may be broken
        spec = importlib.util.find_spec(package)
    except Exception:
        return False
    return spec is not None and spec.origin is not None  # a plain folder named `kernels` in the working directory has none


def _declines(version: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """From first principles, until tools/bench_attention.py says otherwise: FlashAttention-2 and flex_attention, which is
    compiled to Triton, reach much the same rate, FlashAttention-3 and 4 one and a half times that (arXiv 2407.08608), so the
    one may compute a tenth more columns and the others half as many again. Of wider values than flex_attention takes, torch's
    own kernels would store every score."""
    w, dv = q.shape[-1], v.shape[-1]
    if w > WIDEST:
        return None  # it refuses
    c = _cut(version, q, k, v)
    if q.shape[2] < 64 and (c.query, c.pieces * c.value) != (w, dv):
        return "padding the keys would cost more than the attention of a few queries"
    own, flex = c.work(version), columns(w, dv)
    if dv > WIDEST or own <= flex * (1.5 if version > 2 else 1.1):
        return None
    return f"it would compute {own} columns a score, flex_attention {flex}"


def _cut(version: int, q: Tensor, k: Tensor, v: Tensor) -> Cut:
    return cut(q.shape[-1], v.shape[-1], Kind(version, capability(q.device)[0], learns(q, k, v)))


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
    version = 3 if capability(q.device)[0] == 9 else 2
    module = _download(version)
    return attend(module.flash_attn_func, module.flash_attn_varlen_func, q, k, v, mask, _cut(version, q, k, v))


BACKENDS = (
    _from_package(3, "flash_attn_interface"),
    _from_package(4, "flash_attn.cute"),
    _from_package(2, "flash_attn"),
    # On request only: nothing is downloaded silently.
    Backend("hub", _hub, refuses=lambda *call: _refuses(2, "kernels", *call), probed=True, on_request=True, opaque=True),
)
