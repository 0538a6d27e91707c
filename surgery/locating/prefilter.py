"""Splice attribution of all heads as the prefilter of exact measurements, batch by batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.locating.attribution import STARTS, attribute_starts, best_starts
from surgery.locating.attribution_memory import Activations, activations
from surgery.locating.ledger import Ledger, Tensors, digest, gathered
from surgery.locating.questions import Groups
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated, set_starts
from surgery.records.plan import Start
from surgery.runtime import memory, processes
from surgery.runtime.progress import counting

START_EXAMPLES = 64  # few questions decide on a sign


@dataclass(frozen=True)
class Prefilter:
    """The fully gated subject with the best start of every head. activations: what it keeps of a token. whole: batches are not
    divided."""

    gated: Subject
    starts: dict[str, Start]
    ledger: Ledger
    activations: Activations
    whole: bool = False

    def attributions(self, groups: Groups, known: Mapping[int, Tensor] | None = None) -> np.ndarray:
        """(examples, layers, heads), in float32, NaN for heads of attention. known: by number of the batch, (questions, layers,
        heads), where they are known."""
        of_batch = {number: {"values": values} for number, values in (known or {}).items()}
        rest = [number for number in range(len(groups)) if number not in of_batch]

        def measure(number: int) -> Tensors:
            encoded = groups[number][1]
            step = self.activations.step(encoded, memory.spare(self.gated.model.device), whole=self.whole)
            values = attribute_starts(self.gated, encoded, [None], step)[0]
            advance()
            return {"values": values}

        with counting(len(processes.share(rest)), "attribution") as advance:
            of_batch |= self.ledger.gather(rest, lambda number: digest(groups[number][1]), measure)
        shape = (sum(len(chosen) for chosen, _ in groups), *of_batch[0]["values"].shape[1:])
        attributions = np.empty(shape, np.float32)  # half a GB for 256 examples of half a million channels
        for number, (chosen, _) in enumerate(groups):
            attributions[chosen] = of_batch.pop(number)["values"].numpy()
        return attributions


def prefilter(subject: Subject, groups: Groups, ledger: Ledger, *, whole: bool = False) -> tuple[Prefilter, np.ndarray]:
    """Choose every head's start, the one with the largest attribution over the first START_EXAMPLES questions, and attribute:
    (the prefilter, attributions (examples, layers, heads) in float32). whole: batches are not divided to fit into memory."""
    gated = fully_gated(subject)
    first = deciding(groups)
    kept = activations(gated, min((row for _, encoded in groups for row in encoded.rows), key=len))

    def key(number: int) -> Any:
        return ["every start", digest(groups[number][1])]

    def measure(number: int) -> Tensors:
        encoded = groups[number][1]
        values = attribute_starts(gated, encoded, step=kept.step(encoded, memory.spare(subject.model.device), whole=whole))
        advance()
        return {"every": values}

    mine = processes.share(range(first))
    with ledger.on_disk() as kept_ledger, counting(len(mine), "attribution, all starts") as advance:
        # Of all starts, too much to hold, and to send to others: the sums are small.
        sums = gathered({number: {"sum": kept_ledger.tensors(number, key, measure)["every"].sum(1)} for number in mine})
        totals = torch.stack([tensors["sum"] for tensors in sums.values()]).sum(0)
        starts = best_starts(totals, channels=subject.anatomy.ssms[0].width == 1)
        index = torch.zeros(1, 1, *totals.shape[1:], dtype=torch.long)
        index[0, 0][~totals[0].isnan()] = torch.tensor(_numbers(list(starts.values())))
        known = gathered({
            number: {"values": kept_ledger.tensors(number, key, measure)["every"].take_along_dim(index, 0)[0]}
            for number in mine
        })  # fmt: skip
    ledger = ledger.extended("starts", index.flatten().tolist())
    set_starts(gated, starts)
    chosen = Prefilter(gated, starts, ledger, kept, whole)
    return chosen, chosen.attributions(groups, {number: tensors["values"] for number, tensors in known.items()})


def deciding(groups: Groups) -> int:
    """How many of the batches decide on the starts."""
    totals = list(accumulate(len(chosen) for chosen, _ in groups))
    return 1 + next((i for i, total in enumerate(totals) if total >= START_EXAMPLES), len(groups) - 1)


def _numbers(starts: Sequence[Start]) -> list[int]:
    number_of = {start: i for i, start in enumerate(STARTS)}
    return [number_of[start] for start in starts]
