"""Splice attribution of all heads as the prefilter of exact measurements, batch by batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.locating.attribution import STARTS, attribute_starts, best_starts
from surgery.locating.ledger import Ledger, Tensors, digest, gathered
from surgery.locating.questions import Groups
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated
from surgery.records.plan import Start
from surgery.runtime import processes
from surgery.runtime.progress import counting

START_EXAMPLES = 64  # few questions decide on a sign


@dataclass(frozen=True)
class Prefilter:
    """The fully gated subject with the best start of every head."""

    gated: Subject
    starts: dict[str, Start]
    ledger: Ledger

    def attributions(self, groups: Groups, known: Mapping[int, Tensor] | None = None) -> np.ndarray:
        """(examples, layers, heads). known: by number of the batch, (questions, layers, heads), where they are known."""
        of_batch = {number: {"values": values} for number, values in (known or {}).items()}
        rest = [number for number in range(len(groups)) if number not in of_batch]

        def measure(number: int) -> Tensors:
            values = attribute_starts(self.gated, groups[number][1], [None])[0]
            advance()
            return {"values": values}

        with counting(len(processes.share(rest)), "attribution") as advance:
            of_batch |= self.ledger.gather(rest, lambda number: digest(groups[number][1]), measure)
        examples = np.concatenate([chosen for chosen, _ in groups])
        values = torch.cat([of_batch[number]["values"] for number in range(len(groups))])
        return values.double().numpy()[examples.argsort()]


def prefilter(subject: Subject, groups: Groups, ledger: Ledger) -> tuple[Prefilter, np.ndarray]:
    """Choose every head's start, the one with the largest attribution over the first START_EXAMPLES questions, and attribute:
    (the prefilter, attributions (examples, layers, heads))."""
    ungated = fully_gated(subject)
    first = deciding(groups)

    def key(number: int) -> Any:
        return ["every start", digest(groups[number][1])]

    def measure(number: int) -> Tensors:
        values = attribute_starts(ungated, groups[number][1])
        advance()
        return {"every": values}

    with counting(len(processes.share(range(first))), "attribution, all starts") as advance:
        mine = ledger.share(range(first), key, measure)  # of all starts, too much to send to others: the sums are small
    sums = gathered({number: {"sum": tensors["every"].sum(1)} for number, tensors in mine.items()})
    channels = subject.anatomy.mixers[0].width == 1
    starts = best_starts(torch.stack([tensors["sum"] for tensors in sums.values()]).sum(0), channels)
    index = torch.tensor(_numbers(list(starts.values()))).view(1, 1, len(subject.anatomy.blocks), subject.anatomy.heads(0))
    known = gathered({number: {"values": tensors["every"].take_along_dim(index, 0)[0]} for number, tensors in mine.items()})
    chosen = Prefilter(fully_gated(subject, starts), starts, ledger.extended("starts", index.flatten().tolist()))
    return chosen, chosen.attributions(groups, {number: tensors["values"] for number, tensors in known.items()})


def deciding(groups: Groups) -> int:
    """How many of the batches decide on the starts."""
    totals = list(accumulate(len(chosen) for chosen, _ in groups))
    return 1 + next((i for i, total in enumerate(totals) if total >= START_EXAMPLES), len(groups) - 1)


def _numbers(starts: Sequence[Start]) -> list[int]:
    number_of = {start: i for i, start in enumerate(STARTS)}
    return [number_of[start] for start in starts]
