"""Compares the time of several functions within one run.

torch.utils.benchmark times one function after the other, so that a disturbance of the machine hits one of them alone. Here they
take turns."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from surgery.runtime.timing import wait

Runs = Mapping[str, Callable[[], Any]]


def milliseconds(runs: Runs, device: torch.device, *, seconds: float = 6.0, least: int = 3) -> dict[str, float]:
    """The median time of each function in milliseconds, after one call to warm up. The functions take turns for about `seconds`
    and for at least `least` rounds, so that a disturbance of the machine hits all of them."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    beginning = time.perf_counter()
    while len(next(iter(times.values()))) < least or time.perf_counter() - beginning < seconds:
        for name, run in runs.items():
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * median(values) for name, values in times.items()}
