"""Samples: what a small part of a stage costs, measured by doing it, and what follows for the whole.

A model that is too large to be tried whole is tried at two depths, as its own first layers with its own weights, and on fewer
rows: time and memory are linear in both. What is measured is the function that does the work, so nothing here says what a
forward, a step or a proof consists of.
"""

import copy
import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.families import family_of
from surgery.locating.subject import Subject
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.runtime.memory import device_held, measured, resident, trim
from surgery.splicing.splice import adopt, share

WHOLE = 4.0  # seconds: a model whose forward of a full batch takes no longer is tried whole
WHOLE_QUICKLY = 0.5  # the same where a run looks at its own cost before it begins
CUT = (2, 4)  # layers of what is tried of a larger one, at least
LONGEST = 1.5  # seconds that a forward of the larger cut may take; else it gets fewer rows
ROWS = 64  # that are tried of a larger batch, unless locating's own is as large: it may be one that no machine can hold
TWICE = 0.3  # seconds: what takes no longer is measured twice, as the first call finds nothing ready
clock = time.perf_counter


@dataclass(frozen=True)
class Sample:
    """seconds; bytes: the most that was held at once beyond what was held before."""

    seconds: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Sample") -> "Sample":
        """One after the other: the times add up, the larger memory counts."""
        return Sample(self.seconds + other.seconds, max(self.bytes, other.bytes))

    def __mul__(self, times: float) -> "Sample":
        """The same again and again."""
        return Sample(self.seconds * times, self.bytes if times else 0.0)

    def larger(self, factor: float) -> "Sample":
        """Of so many times the rows."""
        return Sample(self.seconds * factor, self.bytes * factor)


def total(samples: Sequence[Sample]) -> Sample:
    """One after the other."""
    return sum(samples, Sample())


def sampled(work: Callable[[], Any], *, repeat: bool = True) -> Sample:
    """Do a piece of work and measure it. repeat: whether it may be done twice."""
    _let_go()
    before, on_device = resident(), device_held()
    with measured() as peak:
        seconds = _seconds(work)
        if repeat and seconds < TWICE:
            seconds = min(seconds, _seconds(work))
    return Sample(seconds, peak.device - on_device if peak.device else max(0, peak.process - before))


def _seconds(work: Callable[[], Any]) -> float:
    start = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def _let_go() -> None:
    """Give freed memory back to the system, so that the next peak is that of new memory."""
    gc.collect(0)
    trim()


def extended(values: Sequence[tuple[float, Sample]], at: float) -> Sample:
    """From samples at one or two sizes to that at another, on a straight line; it never falls below the largest that was
    measured, nor rises slower than nothing."""
    if len(values) == 1:
        return values[0][1]
    (small, first), (large, second) = values
    part = (at - small) / (large - small)

    def along(low: float, high: float) -> float:
        return low + part * (high - low) if high > low else high

    return Sample(along(first.seconds, second.seconds), along(first.bytes, second.bytes))


class Patient:
    """A model that samples are taken of.

    model: adopted, in the end. ids (rows, t): a usual batch. depths: how many of its layers are tried, all or two smaller
    numbers. share: the share of a batch's rows that is tried. most: how many rows that is at most. left_out: whether a batch
    had more. step: about the seconds of a forward of the batch, by one row.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, quick: bool = False):
        self.model, self.tokenizer = adopt(model).eval(), tokenizer
        self.depth, self.heads = family_of(model.config).shape(model.config)
        self._cuts: dict[int, PreTrainedModel] = {self.depth: self.model}
        self.most = max(ROWS, len(ids))
        self.left_out = False
        self.depths, self.share = self._sizes(ids, quick)

    def _sizes(self, ids: torch.Tensor, quick: bool) -> tuple[tuple[int, ...], float]:
        small, large = CUT
        if self.depth <= large:
            one_row = sampled(lambda: self._forward(self.model, ids[:1])).seconds
            self.step = one_row * len(ids)
            return (self.depth,), min(1.0, LONGEST / max(one_row * len(ids), 1e-9))
        one_row = sampled(lambda: self._forward(self.at(small), ids[:1])).seconds
        self.step = one_row / small * self.depth * len(ids)
        if self.step <= (WHOLE_QUICKLY if quick else WHOLE):
            return (self.depth,), 1.0
        layer = max(one_row / small * len(ids), 1e-9)
        # What lies between the two is extended to all layers, with its noise: the further apart they are, the better.
        large = large if quick else max(large, min(self.depth // 2, int(LONGEST / layer)))
        return (small, large), min(1.0, LONGEST / (layer * large))

    @torch.inference_mode()
    def _forward(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)

    @property
    def is_whole(self) -> bool:
        """Whether all layers and all rows are tried."""
        return self.depths == (self.depth,) and self.share == 1.0

    def rows(self, count: int) -> int:
        """How many of a batch's rows are tried."""
        tried = min(math.floor(count * self.share), self.most)
        self.left_out |= tried < math.floor(count * self.share)
        return max(1, tried)

    def at(self, depth: int) -> PreTrainedModel:
        """The model's first layers, as a model that shares its weights."""
        if depth not in self._cuts:
            self._cuts[depth] = cut(self.model, depth)
        return self._cuts[depth]

    def subject(self, depth: int) -> Subject:
        """A subject of the first layers."""
        model = self.at(depth)
        return Subject(model, self.tokenizer, anatomy(model))

    def along(self, measure: Callable[[int], Sample]) -> Sample:
        """What `measure`, of a number of layers, gives for all of them."""
        return extended([(depth, measure(depth)) for depth in self.depths], self.depth)

    @property
    def note(self) -> str:
        """What was tried, in words; empty where that was the whole model on full batches."""
        layers = "" if len(self.depths) == 1 else f"{' and '.join(map(str, self.depths))} of its {self.depth} layers"
        part = f"at most {self.most} of a batch's rows" if self.left_out else ""
        part = part if part or self.share == 1 else f"{self.share:.0%} of a batch's rows"
        return " and ".join(filter(None, (layers, part)))


def cut(model: PreTrainedModel, depth: int) -> PreTrainedModel:
    """The first layers of a model without grafts, with its embeddings and its head; all tensors are the model's own."""
    config = copy.deepcopy(model.config)
    for name in ("num_hidden_layers", "num_blocks"):  # as xLSTM has it as well
        if hasattr(config, name):
            setattr(config, name, depth)
    if isinstance(getattr(config, "layer_types", None), list):
        with suppress(AttributeError):  # of some configurations it follows from others
            config.layer_types = config.layer_types[:depth]
    shallow = family_of(config).empty(config, None)
    share(model, shallow, "the base lacks the tensor '{}'")
    return shallow.eval()


def moved(plan: Plan, depth: int, first: int = 0) -> Plan:
    """The plan in a model of fewer layers: its layers, in their order, are those from `first` on. Where there are not enough,
    the last takes the rest."""
    layers = sorted({site.layer for site in plan.sites})
    places = {layer: min(first + i, depth - 1) for i, layer in enumerate(layers)}
    heads: dict[int, set[int]] = {}
    for site in plan.sites:
        heads.setdefault(places[site.layer], set()).update(site.heads)
    sites = tuple(Site(layer, tuple(sorted(chosen))) for layer, chosen in sorted(heads.items()))
    return plan.model_copy(update={"sites": sites, "starts": {}, "provenance": None})
