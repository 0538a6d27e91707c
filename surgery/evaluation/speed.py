"""What a token costs: time, cache and memory against context length and batch.

In each round all models are timed, one after the other, so that a disturbance of the machine hits all of them; the median of
the rounds counts. Times are of the work alone, not of what other programs take meanwhile (runtime/timing.py). One context (and
batch) is measured for all models before the next one, and its times are kept together.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from surgery.evaluation.cells import Kept
from surgery.evaluation.results import Cost, Speed
from surgery.runtime.timing import Stopwatch, peak_bytes

CACHES = ("cache_params", "past_key_values")  # as state-space models call them, and as Transformers do
ROUNDS, TOKENS = 3, 8


class Timed(Kept):
    """What one context cost, of all models in their order."""

    costs: tuple[Cost, ...] = ()
    speeds: tuple[Speed, ...] = ()

    def each(self) -> list["Timed"]:
        """What it cost of each model alone."""
        return [Timed(costs=(cost,)) for cost in self.costs] + [Timed(speeds=(speed,)) for speed in self.speeds]


def decode_cost(models: Mapping[str, PreTrainedModel], context: int) -> Timed:
    """Batch 1. Context: tokens in the cache when the timed token is decoded."""
    caches = {name: _prefilled(model, context, 1) for name, model in models.items()}
    parts = {name: cache_parts(cache) for name, cache in caches.items()}
    times = _decoding(models, caches, 1)
    return Timed(
        costs=tuple(
            Cost(
                context=context, milliseconds=times[name], cache_bytes=sum(parts[name].values()), cache_parts=parts[name]
            )
            for name in models
        )
    )  # fmt: skip


def decode_forwards() -> int:
    """How many forwards `decode_cost` makes of each model: the prefill, one token that is not counted, and those that are."""
    return 1 + 1 + ROUNDS * TOKENS


def speed(models: Mapping[str, PreTrainedModel], context: int, batch: int) -> Timed:
    """A batch of prompts of `context` tokens."""
    caches: dict[str, Cache] = {}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            watch = Stopwatch(model.device)
            caches[name] = _prefilled(model, context, batch)
            times[name].append(watch.read()[0])
    parts = {name: cache_parts(cache) for name, cache in caches.items()}
    decoding = _decoding(models, caches, batch)
    caches.clear()
    peaks = {name: peak_bytes(partial(_prefilled, model, context, batch), model.device) for name, model in models.items()}
    return Timed(
        speeds=tuple(
            Speed(
                context=context, batch=batch, prefill_milliseconds=1e3 * median(times[name]),
                decode_milliseconds=decoding[name], cache_bytes=sum(parts[name].values()),
                cache_parts=parts[name], peak_bytes=peaks[name],
            )
            for name in models
        )
    )  # fmt: skip


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
        parts["keys"].append(getattr(layer, "keys", None))
        parts["values"].append(getattr(layer, "values", None))
        parts["indexer"] += [held for name, held in vars(layer).items() if name.startswith("indexer_")]
    parts["state"] += getattr(cache, "linear_cache", ())  # MiniMax's
    held = {part: [tensor for tensor in of if isinstance(tensor, torch.Tensor)] for part, of in parts.items()}
    return {part: size for part, of in held.items() if (size := sum(t.numel() * t.element_size() for t in of))}


def decodes(model: PreTrainedModel) -> bool:
    """Whether a model goes on from a cache. transformers' Gated DeltaNet without attention layers counts no tokens, and does
    not."""
    try:
        cache_after(model, 1)
    except ValueError:
        return False
    return True


def cache_after(model: PreTrainedModel, context: int) -> int:
    """Bytes of the cache after so many tokens, of one row."""
    return cache_bytes(_prefilled(model, context, 1))


@torch.inference_mode()
def _prefilled(model: PreTrainedModel, context: int, batch: int) -> Cache:
    ids = (torch.arange(context, device=model.device)[None] % model.config.vocab_size).expand(batch, -1)
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return next(output[name] for name in CACHES if output.get(name) is not None)


@torch.inference_mode()
def _decoding(models: Mapping[str, PreTrainedModel], caches: dict[str, Cache], batch: int) -> dict[str, float]:
    """Median milliseconds of a decoded token, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(ROUNDS):
        for name, model in models.items():
            token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
            for _ in range(TOKENS + (turn == 0)):
                watch = Stopwatch(model.device)
                model(input_ids=token, use_cache=True, **_cached(model, caches[name]))
                times[name].append(watch.read()[0])
    return {name: 1e3 * median(measured[1:]) for name, measured in times.items()}


def _cached(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """The cache as a keyword argument."""
    return {next(name for name in CACHES if name in inspect.signature(model.forward).parameters): cache}
