"""The cache of a model in bytes: what its tensors take."""

from typing import Any

import torch
from transformers import Cache, PreTrainedModel

CACHES = ("cache_params", "past_key_values")  # as state-space models call them, and as Transformers do


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds."""
    return sum(cache_parts(cache).values())


def cache_parts(cache: Cache) -> dict[str, int]:
    """The bytes of a cache's keys, values, recurrent states, states of convolutions, and of what sparse attention chooses by
    (an indexer's keys and positions), as far as there are such."""
    parts: dict[str, list[Any]] = {"keys": [], "values": [], "state": [], "convolution": [], "indexer": []}
    for layer in cache.layers:
        parts["convolution"] += getattr(layer, "conv_states", {}).values()
        parts["state"] += getattr(layer, "recurrent_states", {}).values()
        parts["keys"] += [getattr(layer, name, None) for name in ("keys", "recent_keys", "first_keys")]  # hybrids/windows.py
        parts["values"] += [getattr(layer, name, None) for name in ("values", "recent_values", "first_values")]
        parts["indexer"] += [held for name, held in vars(layer).items() if name.startswith("indexer_")]
    parts["state"] += getattr(cache, "linear_cache", ())  # MiniMax's
    held = {part: [tensor for tensor in of if isinstance(tensor, torch.Tensor)] for part, of in parts.items()}
    return {part: size for part, of in held.items() if (size := sum(t.numel() * t.element_size() for t in of))}


@torch.inference_mode()
def prefilled(model: PreTrainedModel, context: int, batch: int = 1) -> Cache:
    """The cache of a model that has read so many tokens, in each of some rows."""
    ids = (torch.arange(context, device=model.device)[None] % model.config.vocab_size).expand(batch, -1)
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return next(output[name] for name in CACHES if output.get(name) is not None)


def cache_after(model: PreTrainedModel, context: int) -> int:
    """Bytes of the cache after so many tokens, of one row. From where all windows are full on (hybrids/windows.py), every token
    takes as much as any other: no longer prompt is read than that."""
    grafts = getattr(model.config, "grafts", None) or ()
    full = max([64, *(spec["first"] + spec["length"] for spec in grafts if spec.get("kind") == "window")])
    if context <= full + 1:
        return cache_bytes(prefilled(model, context))
    before, after = (cache_bytes(prefilled(model, tokens)) for tokens in (full, full + 1))
    return after + (context - full - 1) * (after - before)


def decodes(model: PreTrainedModel) -> bool:
    """Whether a model goes on from a cache. transformers' Gated DeltaNet without attention layers counts no tokens, and does
    not."""
    try:
        cache_after(model, 1)
    except ValueError:
        return False
    return True
