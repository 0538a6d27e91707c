"""What reading and decoding cost: bytes of the cache, and times relative to the base's.

In each round all models are timed, one after the other, so that a disturbance of the machine hits all of them; a round gives
one ratio to the base, and the spread of the rounds is reported. On a CPU, time is the processor time of this thread, which
computes along with torch's other threads: what other programs take does not count. On a GPU it is time on the wall.
"""

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import Cache

from surgery.errors import UserError
from surgery.evaluation.statistics import estimate
from surgery.models.anatomy import CACHES, find_cache, held_tensors
from surgery.records.report import Cost

ROUNDS, TOKENS = 7, 8  # of each model in turn; decoded in a round, one after the other


def measure_costs(models: Mapping[str, Any], context: int, batch: int, *, reading: bool = False) -> dict[str, Cost]:
    """Model -> what a token after `context` others costs, in each of `batch` rows; the first model is the base. reading: also
    time how the context is read."""
    caches = {name: read_context(model, context, batch) for name, model in models.items()}
    sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
    decode = {name: _decoding(model, caches[name], batch) for name, model in models.items()}
    token = _rounds(decode, models)
    read = {}
    if reading:
        again = {name: (lambda model=model: read_context(model, context, batch)) for name, model in models.items()}
        read = _rounds(again, models)
    base = next(iter(models))
    return {
        name: Cost(
            context=context,
            batch=batch,
            cache_bytes=sizes[name],
            milliseconds=float(np.median(token[name])) * 1e3 / TOKENS,
            token=estimate(token[name] / token[base], decisions=False),
            reading=estimate(read[name] / read[base], decisions=False) if reading else None,
        )
        for name in models
    }


@torch.inference_mode()
def read_context(model: Any, context: int, batch: int = 1) -> Cache:
    """The cache of a model that has read so many tokens, in each of some rows."""
    ids = (torch.arange(context, device=model.device)[None] % model.config.get_text_config().vocab_size).expand(batch, -1)
    _, cache = find_cache(model(input_ids=ids, use_cache=True, logits_to_keep=1))
    if cache is None:
        raise UserError(f"a {model.config.model_type} returns no cache; set bench.contexts=[]")
    return cache


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds, wherever it holds them."""
    return sum(tensor.nbytes for tensor in held_tensors(cache))


def _decoding(model: Any, cache: Cache, batch: int) -> Callable[[], None]:
    """What decodes TOKENS tokens, each after the one before."""
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # what PEFT has wrapped
    name = next(name for name in CACHES if name in inspect.signature(inner.forward).parameters)

    @torch.inference_mode()
    def decode() -> None:
        for _ in range(TOKENS):
            model(input_ids=token, use_cache=True, **{name: cache})

    return decode


def _rounds(work: Mapping[str, Callable[[], Any]], models: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Seconds of each piece of work, (rounds,), in turn; a first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS + 1):
        for name, run in work.items():
            begun = now(models[name].device)
            run()
            times[name].append(now(models[name].device) - begun)
    return {name: np.array(each[1:]) for name, each in times.items()}


def now(device: torch.device) -> float:
    """Seconds, of which differences count: on a GPU on the wall, on a CPU of this thread, which other work does not slow."""
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()
