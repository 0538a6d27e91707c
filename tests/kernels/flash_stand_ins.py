"""FlashAttention 2, 3 and 4 that are none: modules with the published signatures, which refuse what the packages refuse and
return what they return, and compute in float64.

Signatures and limits: flash-attn 2.8.3 (flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp), FlashAttention-3
(hopper/flash_attn_interface.py, hopper/flash_api.cpp) and flash-attn-4 4.0.0b36 (flash_attn/cute/interface.py). What a caller
leaves at its default is refused with any other value: graft attention has no use for it.
"""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from surgery.kernels import flash_attention, probing

VERSIONS = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}


class RefusedError(RuntimeError):
    """What the package would say."""


def demand(condition: bool, complaint: str) -> None:
    if not condition:
        raise RefusedError(complaint)


class Package:
    """One version on a GPU of a compute capability. calls: the widths of each, and whether it had to be deterministic."""

    def __init__(self, version: int, capability: tuple[int, int]):
        self.version, self.capability = version, capability
        self.calls: list[tuple[int, int, bool]] = []

    def module(self) -> ModuleType:
        module = ModuleType(VERSIONS[self.version])
        dense, varlen = {2: self.second, 3: self.third, 4: self.fourth}[self.version]()
        module.flash_attn_func, module.flash_attn_varlen_func = dense, varlen
        return module

    def second(self):
        def flash_attn_func(
            q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
            deterministic=False, return_attn_probs=False,
        ):  # fmt: skip
            demand((dropout_p, window_size, softcap) == (0.0, (-1, -1), 0.0), "not a default")
            demand(alibi_slopes is None and return_attn_probs is False, "not a default")
            return self.dense(q, k, v, softmax_scale, causal, deterministic)

        def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
            window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
            block_table=None,
        ):  # fmt: skip
            demand((dropout_p, window_size, softcap) == (0.0, (-1, -1), 0.0), "not a default")
            demand(alibi_slopes is None and return_attn_probs is False and block_table is None, "not a default")
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return self.packed(q, k, v, *lengths, softmax_scale, causal, deterministic)

        return flash_attn_func, flash_attn_varlen_func

    def third(self):
        def flash_attn_func(
            q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
            window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
            return_attn_probs=False,
        ):  # fmt: skip
            demand(all(m is None for m in (qv, q_descale, k_descale, v_descale, pack_gqa)), "not a default")
            demand((window_size, attention_chunk, softcap, num_splits, sm_margin) == ((-1, -1), 0, 0.0, 1, 0), "not a default")
            y = self.dense(q, k, v, softmax_scale, causal, deterministic)
            return (y, None) if return_attn_probs else y

        def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
            causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
            softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
        ):  # fmt: skip
            others = (seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa)
            demand(all(m is None for m in others), "not a default")
            demand((window_size, attention_chunk, softcap, num_splits, sm_margin) == ((-1, -1), 0, 0.0, 1, 0), "not a default")
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            y = self.packed(q, k, v, *lengths, softmax_scale, causal, deterministic)
            return (y, None) if return_attn_probs else y

        return flash_attn_func, flash_attn_varlen_func

    def fourth(self):
        def flash_attn_func(
            q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
            learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
            score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
            block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
        ):  # fmt: skip
            demand(qv is None and gather_kv_indices is None, "not a default")
            demand((window_size, softcap, num_splits) == ((None, None), 0.0, 1), "not a default")
            return self.dense(q, k, v, softmax_scale, causal, deterministic), None

        def flash_attn_varlen_func(
            q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
            seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
            window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
            score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
            return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
            gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
        ):  # fmt: skip
            demand(all(m is None for m in (qv, seqused_q, seqused_k, gather_kv_indices, page_table)), "not a default")
            demand((window_size, softcap, num_splits) == ((None, None), 0.0, 1), "not a default")
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return self.packed(q, k, v, *lengths, softmax_scale, causal, deterministic), None

        return flash_attn_func, flash_attn_varlen_func

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, deterministic: bool) -> Tensor:
        """(batch, length, heads, width), causal, aligned to the end of the keys."""
        demand(all(m.dim() == 4 for m in (q, k, v)), "expects (batch, length, heads, width)")
        demand(0 < q.shape[0] == k.shape[0] == v.shape[0] <= 65535, "batch sizes")
        demand(k.shape[1] == v.shape[1] >= q.shape[1] > 0, "lengths")
        self.check(q, k, v, scale, causal, deterministic)
        return _round(q, _attention(q, k, v), unequal=self.version == 3 and q.shape[-1] != v.shape[-1])

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, begins: Tensor, begins_k: Tensor, longest: int, longest_k: int, scale: float,
        causal: bool, deterministic: bool,
    ) -> Tensor:  # fmt: skip
        """(all tokens, heads, width); begins: where the sequences begin, and the end of the last."""
        demand(all(m.dim() == 3 for m in (q, k, v)), "expects (tokens, heads, width)")
        for m in (begins, begins_k):
            demand(m is not None and m.dtype == torch.int32 and m.is_contiguous() and m.shape == begins.shape, "cu_seqlens")
        demand(type(longest) is int and type(longest_k) is int, "max_seqlen is a number")
        demand(bool(begins.diff().max() <= longest and begins_k.diff().max() <= longest_k), "max_seqlen is too small")
        demand(
            (int(begins[-1]), int(begins_k[-1])) == (len(q), len(k)) and len(k) == len(v), "cu_seqlens do not end the tokens"
        )
        self.check(q, k, v, scale, causal, deterministic)
        ranges = [[slice(a, b) for a, b in pairwise(x)] for x in (begins.tolist(), begins_k.tolist())]
        parts = [_attention(q[None, a], k[None, b], v[None, b])[0] for a, b in zip(*ranges, strict=True)]
        return _round(q, torch.cat(parts), unequal=self.version == 3 and q.shape[-1] != v.shape[-1])

    def check(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, deterministic: bool) -> None:
        demand(q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype, "float16 or bfloat16")
        demand(scale == 1.0 and causal is True and type(deterministic) is bool, "options")
        (heads, w), dv, (major, _) = q.shape[-2:], v.shape[-1], self.capability
        demand(heads % k.shape[-2] == 0 and k.shape[-2] == v.shape[-2], "heads of queries are a multiple of those of keys")
        demand(k.shape[-1] == w and w % 8 == 0 and dv % 8 == 0, "widths are multiples of 8")
        for m in (q, k, v):  # the third version's loads, and what the others copy or take for granted
            demand(m.stride(-1) == 1 and m.data_ptr() % 16 == 0, "rows are contiguous and begin at 16 bytes")
            demand(not any(step % 8 for step in m.stride()[:-1]), "rows begin at 16 bytes")
        if self.version == 2:
            demand(major >= 8, "Ampere GPUs or newer")
            demand(w == dv <= 256, "one width up to 256")
        elif self.version == 3:
            demand(major == 9, "Hopper GPUs")
            demand(
                w == dv <= 256 or (w <= 64 and dv <= 512) or (128 < w <= 192 and 96 < dv <= 128), f"no kernel for {w} and {dv}"
            )
        elif major == 9:
            demand(8 <= w <= 256 and 8 <= dv <= 256, "between 8 and 256 on SM90")
        else:
            demand(major in (10, 11), "9.x, 10.x, 11.x")
            demand(max(w, dv) <= 128 or (w, dv) in ((192, 128), (256, 256)), f"({w}, {dv}) is not supported on SM100")
        self.calls.append((w, dv, deterministic))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (m.transpose(1, 2).double() for m in (q, k, v))
    t, s = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(2, 3)).masked_fill(~torch.ones(t, s, dtype=torch.bool).tril(s - t), -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, dtype: torch.dtype, unequal: bool) -> Tensor:
        ctx.unequal = unequal
        return y.to(dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        demand(not ctx.unequal, "the backward pass of this version takes one width")
        return gradient.double(), None, None


def _round(q: Tensor, y: Tensor, unequal: bool) -> Tensor:
    return _Rounded.apply(y, q.dtype, unequal)


@pytest.fixture
def installed(monkeypatch):
    """Call it with a compute capability and the versions that are to be installed: version -> Package. Tensors on the CPU then
    pass for some on such a GPU."""

    def install(capability: tuple[int, int], *versions: int) -> dict[int, Package]:
        packages = {version: Package(version, capability) for version in versions}
        for version, package in packages.items():
            monkeypatch.setitem(sys.modules, VERSIONS[version], package.module())
        present = {VERSIONS[version] for version in versions}
        monkeypatch.setattr(flash_attention, "_installed", lambda name: name in present)
        monkeypatch.setattr(flash_attention, "on_gpu", lambda _: True)
        monkeypatch.setattr(flash_attention, "capability", lambda _: capability)
        # What probes have found out about the machine as it is stays, and what they find out now goes.
        monkeypatch.setattr(probing, "_outcomes", {})
        return packages

    return install
