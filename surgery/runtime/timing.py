"""The time and the memory of a piece of work."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class Stopwatch:
    """Seconds of work, and on the wall, since it was made. On an idle machine they are the same. Work is the processor time of
    this thread, which computes along with torch's other threads: what other programs take does not count. On a GPU, which other
    programs seldom use, it is the time on the wall."""

    def __init__(self, device: torch.device):
        self.device = device
        self._begun = self._now()

    def read(self) -> tuple[float, float]:
        """(of work, on the wall)."""
        work, wall = self._now()
        return work - self._begun[0], wall - self._begun[1]

    def _now(self) -> tuple[float, float]:
        wait(self.device)
        wall = time.perf_counter()
        return wall if self.device.type == "cuda" else time.thread_time(), wall


def slowed(work: float, wall: float) -> float:
    """How many times as long as on an idle machine something took."""
    return max(1.0, wall / work) if work > 0 else 1.0


def processor_seconds() -> float:
    """The processor time of all threads of this process so far, and of its child processes that have ended."""
    return sum(os.times()[:4])


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most memory that a call holds at once, including its result, beyond what was held before. Torch's own allocations are
    counted, so the number does not depend on the operating system."""
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it tells the user when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()  # held to the end, so that its release is not counted
    assert record.profiler is not None
    held = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    del result
    return most


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
