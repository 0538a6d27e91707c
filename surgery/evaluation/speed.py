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
from surgery.models.cache import CACHES, cache_parts, prefilled
from surgery.runtime.timing import Stopwatch, peak_bytes

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
    caches = {name: prefilled(model, context, 1) for name, model in models.items()}
    parts = {name: cache_parts(cache) for name, cache in caches.items()}
    times = _decoding(models, caches, 1)
    return Timed(
        costs=tuple(
            Cost(context=context, milliseconds=times[name], cache_bytes=sum(parts[name].values()), cache_parts=parts[name])
            for name in models
        )
    )


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
            caches[name] = prefilled(model, context, batch)
            times[name].append(watch.read()[0])
    parts = {name: cache_parts(cache) for name, cache in caches.items()}
    decoding = _decoding(models, caches, batch)
    caches.clear()
    peaks = {name: peak_bytes(partial(prefilled, model, context, batch), model.device) for name, model in models.items()}
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
