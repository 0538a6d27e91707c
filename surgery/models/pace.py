"""How long a model takes, and how much it holds: a piece of work at two sizes, and a straight line through them.

A forward and a step of training cost so much a call, and so much a token. What a job will run is counted (Work); what one call
costs is timed here, on the very model (Pace). Nothing else estimates. Timed is the work and not the wall (runtime/timing.py):
it is the same whatever else a machine does. How much longer the same takes now is measured beside it.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.runtime.timing import Stopwatch, peak_bytes, slowed

SECONDS = 4.0  # on the wall: that one size of a forward is timed, about, and the longest that is tried
FEW = 32  # tokens of the smallest size
GROWTH = 4  # from one size to the next
REPEATS = 3


@dataclass(frozen=True)
class Work:
    """So many calls with so many tokens in all (rows x length, padding included); largest: the most tokens of one call. A part
    of a call counts as that part."""

    calls: float = 0
    tokens: float = 0
    largest: int = 0

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, int]]) -> "Work":
        """Of calls with (rows, tokens)."""
        sizes = [rows * tokens for rows, tokens in shapes]
        return cls(len(sizes), sum(sizes), max(sizes, default=0))

    def __add__(self, other: "Work") -> "Work":
        return Work(self.calls + other.calls, self.tokens + other.tokens, max(self.largest, other.largest))

    def __mul__(self, times: float) -> "Work":
        return Work(self.calls * times, self.tokens * times, self.largest if times else 0)


@dataclass(frozen=True)
class Piece:
    """A call of so many tokens: its seconds of work, again and again, the most bytes that it holds beyond the model, and how
    many times as long it took on the wall."""

    tokens: float
    times: tuple[float, ...]
    bytes: float = 0.0
    slowed: float = 1.0

    @property
    def seconds(self) -> float:
        return median(self.times)


@dataclass(frozen=True)
class Pace:
    """(for a call, for a token) of seconds and of bytes. seconds: of work. slowed: how many times as long it took on the
    wall."""

    seconds: tuple[float, float]
    bytes: tuple[float, float] = (0.0, 0.0)
    slowed: float = 1.0

    def time(self, work: Work) -> float:
        """The seconds of work."""
        return self.seconds[0] * work.calls + self.seconds[1] * work.tokens

    def memory(self, tokens: float) -> float:
        """The bytes that a call of so many tokens holds."""
        return self.bytes[0] + self.bytes[1] * tokens if tokens else 0.0

    def times(self, factor: float) -> "Pace":
        """Of what takes so many times as long."""
        return Pace((factor * self.seconds[0], factor * self.seconds[1]), self.bytes, self.slowed)

    def along(self, other: "Pace", part: float) -> "Pace":
        """On the line from this one to another, so many times as far."""

        def between(low: tuple[float, float], high: tuple[float, float]) -> tuple[float, float]:
            call, token = (a + part * max(0.0, b - a) for a, b in zip(low, high, strict=True))
            return call, token

        return Pace(
            between(self.seconds, other.seconds), between(self.bytes, other.bytes), max(self.slowed, other.slowed)
        )  # fmt: skip


def paced(measure: Callable[[int], Piece], small: int, whole: int, seconds: float) -> Pace:
    """From pieces of growing size, up to the whole or to about so many seconds a call on the wall: a line through the first and
    the last.

    measure: from a size to the piece, whose tokens need not be the size."""
    size, first = small, measure(small)
    last = first
    while size < whole and last.seconds * last.slowed * GROWTH <= seconds:
        size = min(whole, size * GROWTH)
        last = measure(size)
    return Pace(_line(first, last, "seconds"), _line(first, last, "bytes"), last.slowed)


def _line(first: Piece, last: Piece, what: str) -> tuple[float, float]:
    """(for a call, for a token); neither is negative, whatever the noise."""
    low, high = getattr(first, what), getattr(last, what)
    each = (high - low) / (last.tokens - first.tokens) if last.tokens > first.tokens else 0.0
    fixed = high - each * last.tokens
    return (fixed, each) if each > 0 and fixed >= 0 else (0.0, high / last.tokens)


@torch.inference_mode()
def forward_pace(model: PreTrainedModel, ids: Tensor, memory: bool = False) -> Pace:
    """Of a forward without gradients. ids (rows, t): a full batch; a part of it is run. memory: whether bytes are measured."""

    def measure(size: int) -> Piece:
        rows = size // ids.shape[1]
        part = ids[:rows] if rows else ids[:1, :size]

        def forward() -> None:
            model(input_ids=part, use_cache=False, logits_to_keep=1)

        held = peak_bytes(forward, part.device) if memory else 0  # this one is not timed: it finds nothing ready
        times, slower = timed(forward, part.device, warm=memory)
        return Piece(part.numel(), times, held, slower)

    return paced(measure, min(FEW, ids.numel()), ids.numel(), SECONDS)


def timed(work: Callable[[], object], device: torch.device, warm: bool = False) -> tuple[tuple[float, ...], float]:
    """(the seconds of work of a few calls, of one if it is long; how many times as long they took on the wall). warm: the first
    call counts, too."""
    times: list[tuple[float, float]] = []
    while len(times) < REPEATS + (not warm) and (not times or sum(wall for _, wall in times) < SECONDS):
        watch = Stopwatch(device)
        work()
        times.append(watch.read())
    return measured(times if warm or len(times) == 1 else times[1:])


def measured(times: Iterable[tuple[float, float]]) -> tuple[tuple[float, ...], float]:
    """From (seconds of work, on the wall) of some calls: those of work, and how many times as long they took."""
    work, wall = zip(*times, strict=True)
    return work, slowed(sum(work), sum(wall))


def load() -> float:
    """How many programs run or wait on average, per CPU of this machine; 0 where the system does not say."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
