"""The suite speed: prefill, decoding, memory and cache."""

from collections.abc import Mapping
from functools import partial
from statistics import median

from transformers import Cache, PreTrainedModel

from surgery.evaluation.decoding import ROUNDS, Timed, Timing, decoding, decoding_shapes
from surgery.evaluation.results import Speed
from surgery.evaluation.suites import measured
from surgery.models.cache import cache_parts, prefilled
from surgery.records.recipe import Bench
from surgery.runtime.timing import Stopwatch, peak_bytes

PLACE = 70
SUITES = {"speed": "Prefill, decoding, memory and cache against context."}
LENGTHS = "only"


def timings(options: Bench, contexts: list[int]) -> list[Timing]:
    if "speed" not in measured(options):
        return []
    return [
        Timing(
            f"speed {context} {batch}",
            partial(speed, context=context, batch=batch),
            [*[(batch, context)] * (ROUNDS + 1), *decoding_shapes(batch)],
        )
        for context in contexts
        for batch in options.batches
    ]


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
    times_of_tokens = decoding(models, caches, batch)
    caches.clear()
    peaks = {name: peak_bytes(partial(prefilled, model, context, batch), model.device) for name, model in models.items()}
    return Timed(
        speeds=tuple(
            Speed(
                context=context, batch=batch, prefill_milliseconds=1e3 * median(times[name]),
                decode_milliseconds=times_of_tokens[name], cache_bytes=sum(parts[name].values()),
                cache_parts=parts[name], peak_bytes=peaks[name],
            )
            for name in models
        )
    )  # fmt: skip
