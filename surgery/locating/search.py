"""How the heads of a subject are measured on a set of questions: which of them, and in which order."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surgery.locating.exact import Exact
from surgery.locating.heads import ScoreName
from surgery.locating.ledger import Ledger
from surgery.locating.prefilter import Prefilter
from surgery.locating.questions import QuestionSet
from surgery.locating.stability import HeadScores, ScoreColumn
from surgery.locating.subject import Subject
from surgery.models.anatomy import Anatomy
from surgery.records.recipe import Locate
from surgery.records.site import Site

LEADING = 10  # of a share of the heads, those that are never given up, and that are ablated, too, for their roles
DRAWN = 8  # heads that did not lead, measured as a control


@dataclass(frozen=True)
class Search:
    """How the heads of a subject are measured, whatever the questions. prefilter: None where nothing can be grafted."""

    subject: Subject
    prefilter: Prefilter | None
    ledger: Ledger
    options: Locate

    @property
    def score(self) -> ScoreName:
        """What heads are ranked by."""
        if not self.options.exact:
            return "attribution"
        return "splice_loss" if self.prefilter else "ablation_loss"

    @property
    def kind(self) -> str:
        """What is done to a head to get its score."""
        return "splice" if self.prefilter else "ablate"

    def first(self, questions: QuestionSet, values: np.ndarray | None) -> tuple[Exact, list[Site], list[Site]]:
        """What a ranking says in full: (the measurements, leading heads, heads drawn among the others). values: attributions
        (examples, layers, heads)."""
        measured = self.exact(questions)
        if not self.options.exact:
            measured.measure([], layers=False)
            return measured, [], []
        if self.options.exact == 1:
            measured.measure(None, layers=self.options.layers)
            return measured, self.subject.anatomy.sites(), []
        leading, others = self._split(measured, values, self.options.exact)
        control = drawn(self.subject.anatomy, others, questions.seed)
        chosen = [*leading, *control]
        if self.prefilter is None:
            measured.measure(chosen, layers=False, kinds=("ablate",), leading=LEADING)
        else:
            measured.measure(chosen, layers=self.options.layers, kinds=("splice",), leading=LEADING)
            gains = dict(zip(chosen, np.nanmean(measured.effects(chosen)["splice_loss"], axis=0), strict=True))
            best = sorted(chosen, key=lambda site: -gains[site])[:LEADING]
            measured.measure(best, layers=self.options.layers, kinds=("ablate",))
        return measured, leading, control

    def again(self, questions: QuestionSet, always: Sequence[Site]) -> HeadScores:
        """What ranks heads, and nothing else, on other questions; `always`: heads that are not given up."""
        values = None if self.prefilter is None else self.prefilter.attributions(questions.groups)
        measured = self.exact(questions)
        if not self.options.exact:
            measured.measure([], layers=False)
        elif self.options.exact == 1:
            measured.measure(None, layers=False, kinds=(self.kind,))
        else:
            leading, _ = self._split(measured, values, self.options.exact)
            measured.measure(leading, layers=False, kinds=(self.kind,), leading=LEADING)
            measured.measure(always, layers=False, kinds=(self.kind,))
        return self.scores(questions, measured, values).only(self.subject.anatomy.numbers(always))

    def scores(self, questions: QuestionSet, measured: Exact, values: np.ndarray | None) -> HeadScores:
        """The scores that rank heads, for the comparison of rankings."""
        anatomy, heads = self.subject.anatomy, measured.heads()
        columns: dict[ScoreName, ScoreColumn] = {}
        if self.options.exact:
            columns[self.score] = ScoreColumn(measured.effects(heads)[self.score], anatomy.numbers(heads))
        if values is not None:
            columns["attribution"] = ScoreColumn(of_heads(values, anatomy))
        probe = {"name": questions.name, "options": questions.options}
        return HeadScores(probe, questions.seed, measured.correct["base", None], columns, len(anatomy.coordinates[0]))

    def exact(self, questions: QuestionSet) -> Exact:
        """What measures sites on questions."""
        gated, ledger = (self.prefilter.gated, self.prefilter.ledger) if self.prefilter else (None, self.ledger)
        return Exact(self.subject, questions, gated=gated, ablation=self.options.ablation, ledger=ledger)

    def _split(self, measured: Exact, values: np.ndarray | None, share: float) -> tuple[list[Site], list[int]]:
        """The share of the heads that is to be measured exactly, the most promising first, and the others' numbers. What is
        promising: by attribution, or, where there is none, by what ablating the head's layer costs, which this measures."""
        anatomy = self.subject.anatomy
        layers, heads = anatomy.coordinates
        if values is not None:
            promise = values.mean(0, dtype=float)[layers, heads]
        else:
            measured.measure([], layers=True)
            with_mixer = anatomy.layers()
            costs = measured.effects([Site(layer) for layer in with_mixer])["ablation_loss"].mean(0)
            promise = costs[np.searchsorted(with_mixer, layers)]
        order = np.argsort(-promise, kind="stable")
        order = order[~np.isnan(promise[order])].tolist()  # NaN: heads of attention, which can only be ablated
        count = share_of(share, len(order))
        return [anatomy.site(number) for number in order[:count]], order[count:]


def share_of(share: float, heads: int) -> int:
    """How many heads a share of them is, rounded up; 7% of 100 are 7, in floating point, too."""
    return math.ceil(share * heads - 1e-9)


def measured_at_most(exact: float, heads: int) -> int:
    """How many heads are measured one by one: all, or a share of them and the control."""
    return heads if exact == 1 else min(heads, share_of(exact, heads) + DRAWN)


def drawn(anatomy: Anatomy, numbers: Sequence[int], seed: int) -> list[Site]:
    """A control: a few of the heads that do not lead, given by their numbers."""
    chosen = random.Random(f"control {seed}").sample(numbers, min(DRAWN, len(numbers)))
    return sorted(anatomy.site(number) for number in chosen)


def of_heads(values: np.ndarray, anatomy: Anatomy) -> np.ndarray:
    """(examples, heads): of an array (examples, layers, most heads of a layer) what belongs to heads."""
    layers, heads = anatomy.coordinates
    if len(heads) == values[0].size:  # all of it: half a million channels of 256 examples are half a GB, and not copied
        return values.reshape(len(values), -1)
    return values[:, layers, heads]
