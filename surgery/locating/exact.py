"""Exact measurements of sites on all the questions, collected from the walks through their batches."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.locating import walk
from surgery.locating.ledger import Ledger, Tensors, digest
from surgery.locating.questions import QuestionSet
from surgery.locating.replay import How, Replay
from surgery.locating.subject import Subject
from surgery.models.finite import explained, within
from surgery.probes.encoded import Encoded, padded
from surgery.records.site import Site
from surgery.runtime import processes
from surgery.runtime.progress import counting

KINDS = ("base", "ablate", "splice")  # of variants
RELEVANT = 0.01  # nats that a head must gain (or cost) to be worth more questions


class Exact:
    """What ablating and splicing sites does to every question.

    gated: the subject fully gated (walk.fully_gated); None: nothing is spliced. ablation: what comes instead of an ablated head
    (Layer.ablation). ledger: where batches are kept; it has to know the weights of the subject, and the starts of `gated`.
    """

    def __init__(
        self,
        subject: Subject,
        questions: QuestionSet,
        *,
        gated: Subject | None = None,
        ablation: How = "zero",
        ledger: Ledger | None = None,
    ):
        self.subject, self.gated, self.groups = subject, gated, questions.groups
        self.how, self.reference = ablation, questions.reference
        reference = None if self.reference is None else [part.tolist() for part in self.reference]
        self.ledger = (ledger or Ledger()).extended(ablation, reference)
        examples = sum(len(chosen) for chosen, _ in self.groups)
        # Of every question; NaN where a site was not measured on it.
        self.correct: dict[tuple[str, Site | None], np.ndarray] = defaultdict(lambda: np.full(examples, np.nan))
        self.losses: dict[tuple[str, Site | None], np.ndarray] = defaultdict(lambda: np.full(examples, np.nan))

    def measure(
        self,
        heads: Collection[Site] | None,
        *,
        layers: bool,
        kinds: Sequence[str] = ("ablate", "splice"),
        leading: int | None = None,
    ) -> None:
        """Measure heads (None: all), and whole layers; with neither, the base alone.

        leading: how many heads matter. After 2, 4, 8, ... batches some heads are given up, and their scores stand on the
        questions so far: those that can no longer be among the best `leading`, or that are worth less than RELEVANT nats (by
        kinds[0]), and the worse half, as long as twice `leading` are left (successive halving). At these points all processes
        know the same results, so that scores do not depend on how many processes there are.
        """
        measured = set(self.subject.anatomy.sites() if heads is None else heads)
        sites = len(measured) + (len(self.subject.anatomy.layers()) if layers else 0)
        per_batch = 1 + sites * len([kind for kind in kinds if kind == "ablate" or self.gated is not None])
        # Of what is counted, some may be given up, or read from the ledger.
        with counting(len(processes.share(self.groups)) * per_batch, "locate" if sites else "asking the base") as advance:
            for begin, end in pairwise(_stops(len(self.groups), leading is not None)):
                if begin:
                    assert leading is not None
                    measured = measured - self._hopeless(sorted(measured), kinds[0], leading)
                self._measure(range(begin, end), measured, layers, kinds, advance)

    def _measure(
        self, numbers: Iterable[int], heads: Collection[Site], layers: bool, kinds: Sequence[str], advance: Callable[[], None]
    ) -> None:
        """The same heads on some of the batches."""
        what = [layers, [str(site) for site in sorted(heads)], list(kinds)]

        def key(number: int) -> Any:
            chosen, encoded = self.groups[number]
            return ["exact", *what, chosen if self.reference is not None else None, digest(encoded)]

        def measure(number: int) -> Tensors:
            chosen, encoded = self.groups[number]
            model = self.subject.model
            donors = None if self.reference is None else _donors(chosen, encoded, len(self.reference[0]))
            ids, last = padded(encoded.rows, model.device)
            at = encoded.target_positions()
            replay = Replay(self.subject, ids, last, at=at, reference=self.reference, donors=donors)
            variants = walk.variants(replay, self.gated, layers=layers, heads=heads, kinds=kinds, how=self.how)
            names, correct, losses = [], [], []
            with explained(model, encoded.rows):
                for variant in variants:
                    head = [] if variant.site is None else [variant.site.layer, *(variant.site.heads or [-1])]
                    names.append([KINDS.index(variant.kind), *(head or [-1, -1])])
                    with within(f"{variant.kind} {variant.site}" if variant.site else "the whole model"):
                        correct.append(encoded.correct(variant.logits).cpu())
                        losses.append(encoded.losses(variant.logits).cpu())
                    advance()
                    if not (heads or layers):
                        break
            return {"variants": torch.tensor(names), "correct": torch.stack(correct), "losses": torch.stack(losses)}

        for number, tensors in self.ledger.gather(numbers, key, measure).items():
            chosen, _ = self.groups[number]
            columns = (tensors["correct"].numpy(), tensors["losses"].numpy())
            for (kind, layer, head), correct, losses in zip(tensors["variants"].tolist(), *columns, strict=True):
                site = None if layer < 0 else Site(layer, () if head < 0 else (head,))
                self.correct[KINDS[kind], site][chosen] = correct
                self.losses[KINDS[kind], site][chosen] = losses

    def _hopeless(self, heads: Sequence[Site], kind: str, leading: int) -> set[Site]:
        """The heads whose 99% interval is below that of at least `leading` others, or below RELEVANT, and the worse half of
        all, as long as twice `leading` are left. kind: "splice" or "ablate", by which they are compared."""
        if not heads:
            return set()
        values = self.effects(heads)["splice_loss" if kind == "splice" else "ablation_loss"]
        values = values[~np.isnan(values).any(1)]
        centre, margin = values.mean(0), 2.58 * values.std(0) / len(values) ** 0.5
        bound = max(RELEVANT, np.sort(centre - margin)[-leading]) if len(heads) > leading else RELEVANT
        hopeless = {head for head, most in zip(heads, centre + margin, strict=True) if most < bound}
        staying = max(2 * leading, -(-len(heads) // 2))
        return hopeless | {heads[i] for i in (-centre).argsort(kind="stable")[staying:]}

    def heads(self) -> list[Site]:
        """The heads that were measured, in order."""
        return sorted({site for _, site in self.losses if site is not None and site.heads})

    def effects(self, sites: Sequence[Site]) -> dict[str, np.ndarray]:
        """Score's field -> (examples, sites), NaN where a site was not measured. Accuracies and nats, lost or gained."""
        base = {"correct": self.correct["base", None], "losses": self.losses["base", None]}

        def change(what: str, kind: str, sign: int) -> np.ndarray:
            table, changes = getattr(self, what), np.full((len(base[what]), len(sites)), np.nan)
            for column, site in enumerate(sites):  # few of the thousands of channels of a Mamba-1 were measured
                if (kind, site) in table:
                    changes[:, column] = sign * (table[kind, site] - base[what])
            return changes

        return {
            "ablation_drop": change("correct", "ablate", -1),
            "ablation_loss": change("losses", "ablate", 1),
            "splice_gain": change("correct", "splice", 1),
            "splice_loss": change("losses", "splice", -1),
        }


def _stops(batches: int, deciding: bool) -> list[int]:
    """0, the numbers of batches after which there is something to decide, and all of them."""
    powers = [1 << i for i in range(1, batches.bit_length()) if 1 << i < batches] if deciding else []
    return [0, *powers, batches]


def _donors(chosen: list[int], encoded: Encoded, references: int) -> Tensor:
    """The reference row of every row: the same for a question however the batches are cut."""
    return torch.tensor(chosen)[encoded.owners()] % references
