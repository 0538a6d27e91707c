"""What a user says of documents that share a row, and what it means.

A new document begins, as everywhere in transformers, where `position_ids` do not go on by one, where `seq_idx` changes, and at
the tokens that `cu_seq_lens_q` and `cu_seq_lens_k` name: all that DataCollatorWithFlattening gives. Where several are
given, each of them may begin one.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from surgery.kernels.packing import Packing
from surgery.kernels.packing import packed as packing_of

# How many tokens stand before each document, of all b * t, and their number at last.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens", "cu_seqlens")
PACKED = ("seq_idx", *BOUNDS)


def packing(
    hidden: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    use_cache: bool | None,
    given: dict[str, Any],
) -> Packing | None:
    """The documents of hidden (b, t, ...), or None where every row is one. given: more keyword arguments, PACKED among them.

    attention_mask: the user's; padding (b, t) belongs to no document, and positions on it mean nothing. Raises ValueError for
    bounds that are none, for padding within a document, and for documents with a cache.
    """
    b, t = hidden.shape[:2]
    told = [name for name in PACKED if given.get(name) is not None]
    if t < 2 or not b or (position_ids is None and not told):
        return None
    # All of this is decided on the host, which waits for a GPU once, to get the numbers, and not for each decision.
    mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    real = torch.ones(b, t, dtype=torch.bool, device="cpu") if mask is None else mask[:, -t:].bool().cpu()
    # Every token's distance from the real one before it, and where that is, or itself for the first one of a row.
    at = torch.arange(t, device="cpu").expand(b, t)
    before = torch.where(real, at, -1).cummax(-1).values.roll(1, -1)
    before[:, 0] = -1
    first = before < 0
    before = torch.where(first, at, before)
    begins = torch.zeros_like(real)
    if position_ids is not None and position_ids.shape[-1] == t:
        position_ids = position_ids.cpu().expand(b, t)
        step = position_ids - position_ids.gather(-1, before)
        begins = (step != 1) & (step != at - before)  # positions may count padding between two tokens, or not
    for name in told:
        numbers = _numbers(name, torch.as_tensor(given[name], device="cpu"), b, t)
        begins = begins | (numbers != numbers.gather(-1, before))
    begins = begins & real & ~first
    if not begins.any():
        return None
    if attention_mask is not None and mask is None:
        raise ValueError("packed documents take an attention mask of (batch, tokens), not one of pairs of tokens; leave it out")
    if use_cache or cache is not None:
        raise ValueError("packed documents cannot be continued from a cache: leave out use_cache and cache_params, or pad them")
    if (real & ~first & ~begins & (at - before > 1)).any():
        raise ValueError("there is padding within a packed document; leave it out, or put it between documents")
    return packing_of(torch.where(real, begins.cumsum(-1), -1), hidden.device)


def _numbers(name: str, value: Tensor, b: int, t: int) -> Tensor:
    """Of every token (b, t), a number that changes where a document begins."""
    if name == "seq_idx":
        if value.numel() != b * t:
            raise ValueError(f"seq_idx holds {value.numel()} numbers for {b} x {t} tokens")
        return value.view(b, t)
    bounds = value.flatten().long()
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != b * t or (bounds.diff() < 0).any():
        raise ValueError(f"{name} has to rise from 0 to the number of tokens, {b * t}, not {bounds[:8].tolist()}")
    begins = bounds.new_zeros(b * t).index_fill(0, bounds[bounds < b * t], 1)
    return begins.cumsum(0).view(b, t)
