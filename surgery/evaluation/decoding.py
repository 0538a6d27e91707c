"""What decoding a token costs: time and cache against context length; and how times are taken, here and by other suites.

In each round all models are timed, one after the other, so that a disturbance of the machine hits all of them; the median of
the rounds counts. Times are of the work alone, not of what other programs take meanwhile (runtime/timing.py). One context (and
batch) is measured for all models before the next one, and its times are kept together.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from surgery.evaluation.cells import Kept
from surgery.evaluation.results import Cost, Speed
from surgery.evaluation.task import Shapes
from surgery.models.cache import CACHES, cache_parts, prefilled
from surgery.records.record import KERNEL_PACKAGES, PACKAGES, environment
from surgery.runtime.timing import Stopwatch

ROUNDS, TOKENS = 3, 8


class Timed(Kept):
    """What one context cost, of all models in their order."""

    costs: tuple[Cost, ...] = ()
    speeds: tuple[Speed, ...] = ()

    def each(self) -> list["Timed"]:
        """What it cost of each model alone."""
        return [Timed(costs=(cost,)) for cost in self.costs] + [Timed(speeds=(speed,)) for speed in self.speeds]


@dataclass(frozen=True)
class Timing:
    """What is timed at once. cell: what it is called where it is kept. measure: times the models that are there, side by side.
    shapes: of the forwards of each; a token after a cache counts as a row of one."""

    cell: str
    measure: Callable[[Mapping[str, PreTrainedModel]], Timed]
    shapes: Shapes


def here() -> dict[str, Any]:
    """A time belongs to where it was taken."""
    place = environment((*PACKAGES, *KERNEL_PACKAGES))
    packages = {name: place.packages[name] for name in (*PACKAGES, *KERNEL_PACKAGES)}
    return {"machine": place.machine, "number of threads": place.threads, "packages": packages}


def decode_timing(context: int) -> Timing:
    """Batch 1. Context: tokens in the cache when the timed token is decoded."""

    def measure(models: Mapping[str, PreTrainedModel]) -> Timed:
        caches = {name: prefilled(model, context, 1) for name, model in models.items()}
        parts = {name: cache_parts(cache) for name, cache in caches.items()}
        times = decoding(models, caches, 1)
        return Timed(
            costs=tuple(
                Cost(context=context, milliseconds=times[name], cache_bytes=sum(parts[name].values()), cache_parts=parts[name])
                for name in models
            )
        )

    return Timing(f"cost {context}", measure, [(1, context), *decoding_shapes(1)])


@torch.inference_mode()
def decoding(models: Mapping[str, PreTrainedModel], caches: dict[str, Cache], batch: int) -> dict[str, float]:
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


def decoding_shapes(batch: int) -> Shapes:
    """Of the forwards of `decoding`."""
    return [(batch, 1)] * (1 + ROUNDS * TOKENS)


def _cached(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """The cache as a keyword argument."""
    return {next(name for name in CACHES if name in inspect.signature(model.forward).parameters): cache}
