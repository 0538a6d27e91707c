"""What a token costs: decoding time and cache size against context length.

Models are timed in turn within each round, so that a disturbance of the machine hits all of them, and medians are taken.
"""

import time
from collections.abc import Mapping
from statistics import median

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from surgery.bench.report import Cost

ROUNDS, TOKENS = 3, 8


def decode_cost(models: Mapping[str, PreTrainedModel], contexts: tuple[int, ...]) -> dict[str, tuple[Cost, ...]]:
    """By model, one Cost a context; batch 1. Context: tokens in the cache when the timed token is decoded."""
    out: dict[str, list[Cost]] = {name: [] for name in models}
    with torch.inference_mode():
        for context in contexts:
            caches: dict[str, Cache] = {}
            times: dict[str, list[float]] = {name: [] for name in models}
            for name, model in models.items():
                ids = torch.arange(context, device=model.device)[None] % model.config.vocab_size
                caches[name] = DynamicCache(config=model.config)
                model(input_ids=ids, cache_params=caches[name], use_cache=True, logits_to_keep=1)
            sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
            for _ in range(ROUNDS):
                for name, model in models.items():
                    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
                    for _ in range(TOKENS):
                        _wait(model)
                        start = time.perf_counter()
                        model(input_ids=token, cache_params=caches[name], use_cache=True)
                        _wait(model)
                        times[name].append(time.perf_counter() - start)
            for name in models:
                out[name].append(Cost(context=context, milliseconds=1e3 * median(times[name]), cache_bytes=sizes[name]))
    return {name: tuple(costs) for name, costs in out.items()}


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds: conv and recurrent states, keys and values."""
    total = 0
    for layer in cache.layers:
        states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        for tensor in (*states, getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is not None:
                total += tensor.numel() * tensor.element_size()
    return total


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
