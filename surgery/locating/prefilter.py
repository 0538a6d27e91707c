"""Splice attribution of all heads as the prefilter of exact measurements, batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.locating.attribution import STARTS, attribute_starts, best_starts
from surgery.locating.ledger import Ledger, Tensors, digest, gathered
from surgery.locating.questions import Groups
from surgery.locating.walk import fully_gated
from surgery.models.anatomy import Anatomy
from surgery.records.plan import Start

START_EXAMPLES = 64  # a sign is plain from few


@dataclass(frozen=True)
class Prefilter:
    """The fully gated base with the best start of every head."""

    gated: PreTrainedModel
    starts: dict[str, Start]
    ledger: Ledger

    def attributions(self, groups: Groups, known: dict[int, Tensor] | None = None) -> np.ndarray:
        """(examples, layers, heads). known: of some of the batches, (questions, layers, heads)."""
        found = {number: {"values": values} for number, values in (known or {}).items()}
        rest = [number for number in range(len(groups)) if number not in found]
        found |= self.ledger.every(
            rest, lambda number: digest(groups[number][1]),
            lambda number: {"values": attribute_starts(self.gated, groups[number][1], [None])[0]},
        )  # fmt: skip
        examples = np.concatenate([chosen for chosen, _ in groups])
        values = torch.cat([found[number]["values"] for number in range(len(groups))])
        return values.double().numpy()[examples.argsort()]


def prefilter(base: PreTrainedModel, found: Anatomy, groups: Groups, ledger: Ledger) -> tuple[Prefilter, np.ndarray]:
    """Choose every head's start, the one with the largest attribution over the first START_EXAMPLES questions, and attribute:
    (the prefilter, attributions (examples, layers, heads))."""
    layers, heads = len(found.blocks), found.heads(0)
    ungated = fully_gated(base, layers, heads)
    asked = list(accumulate(len(chosen) for chosen, _ in groups))
    first = 1 + next((i for i, total in enumerate(asked) if total >= START_EXAMPLES), len(groups) - 1)

    def what(number: int) -> Any:
        return ["every start", digest(groups[number][1])]

    def measure(number: int) -> Tensors:
        return {"every": attribute_starts(ungated, groups[number][1])}

    mine = ledger.share(range(first), what, measure)  # of every start, too much to send around: the sums are
    sums = gathered({number: {"sum": tensors["every"].sum(1)} for number, tensors in mine.items()})
    starts = best_starts(torch.stack([tensors["sum"] for tensors in sums.values()]).sum(0), found.mixers[0].width == 1)
    index = torch.tensor(_numbers(list(starts.values()))).view(1, 1, layers, heads)
    known = gathered({number: {"values": tensors["every"].take_along_dim(index, 0)[0]} for number, tensors in mine.items()})
    ready = Prefilter(fully_gated(base, layers, heads, starts), starts, ledger.under("starts", index.flatten().tolist()))
    return ready, ready.attributions(groups, {number: tensors["values"] for number, tensors in known.items()})


def _numbers(starts: Sequence[Start]) -> list[int]:
    number_of = {start: i for i, start in enumerate(STARTS)}
    return [number_of[start] for start in starts]
