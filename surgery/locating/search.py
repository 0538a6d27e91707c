"""How the heads of a subject are measured on a set of questions: which of them, and in which order."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surgery.locating.exact import Exact
from surgery.locating.ledger import Ledger
from surgery.locating.prefilter import Prefilter
from surgery.locating.questions import QuestionSet
from surgery.locating.stability import ScoreName, Scores
from surgery.locating.subject import Subject
from surgery.records.recipe import Locate
from surgery.records.site import Site

LEADING = 10  # confirmed heads that are measured on all examples, and also ablated, for their roles
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
        measured, sites = self._exact(questions), self.subject.anatomy.sites()
        if not self.options.exact:
            measured.measure([], layers=False)
            return measured, [], []
        if self.options.confirm is None:
            measured.measure(None, layers=self.options.layers)
            return measured, sites, []
        leading, others = self._split(measured, values, self.options.confirm)
        control = drawn(others, questions.seed)
        chosen = [*leading, *control]
        if self.prefilter is None:
            measured.measure(chosen, layers=False, kinds=("ablate",), leading=LEADING)
        else:
            measured.measure(chosen, layers=self.options.layers, kinds=("splice",), leading=LEADING)
            gains = dict(zip(chosen, np.nanmean(measured.effects(chosen)["splice_loss"], axis=0), strict=True))
            best = sorted(chosen, key=lambda site: -gains[site])[:LEADING]
            measured.measure(best, layers=self.options.layers, kinds=("ablate",))
        return measured, leading, control

    def again(self, questions: QuestionSet, always: Sequence[Site]) -> Scores:
        """What ranks heads, and nothing else, on other questions; `always`: heads that are not given up."""
        values = None if self.prefilter is None else self.prefilter.attributions(questions.groups)
        measured = self._exact(questions)
        if not self.options.exact:
            measured.measure([], layers=False)
        elif self.options.confirm is None:
            measured.measure(None, layers=False, kinds=(self.kind,))
        else:
            leading, _ = self._split(measured, values, self.options.confirm)
            measured.measure(leading, layers=False, kinds=(self.kind,), leading=LEADING)
            measured.measure(always, layers=False, kinds=(self.kind,))
        return self.scores(questions, measured, values)

    def scores(self, questions: QuestionSet, measured: Exact, values: np.ndarray | None) -> Scores:
        """The scores that rank heads, for the comparison of rankings."""
        sites = self.subject.anatomy.sites()
        columns: dict[ScoreName, np.ndarray] = {}
        if self.options.exact:
            columns[self.score] = measured.effects(sites)[self.score]
        if values is not None:
            columns["attribution"] = values[index_of(sites)]
        probe = {"name": questions.name, "options": questions.options}
        return Scores(probe, questions.seed, measured.correct["base", None], columns)

    def _exact(self, questions: QuestionSet) -> Exact:
        gated, ledger = (self.prefilter.gated, self.prefilter.ledger) if self.prefilter else (None, self.ledger)
        return Exact(self.subject, questions, gated=gated, ablation=self.options.ablation, ledger=ledger)

    def _split(self, measured: Exact, values: np.ndarray | None, share: float) -> tuple[list[Site], list[Site]]:
        """The share of the heads that is to be confirmed, the most promising first, and the others. What is promising: by
        attribution, or, where there is none, by what ablating the head's layer costs, which this measures."""
        anatomy = self.subject.anatomy
        sites = anatomy.sites()
        if values is not None:
            promise = dict(zip(sites, values.mean(0)[index_of(sites)[1:]], strict=True))
        else:
            measured.measure([], layers=True)
            layers = anatomy.layers()
            costs = measured.effects([Site(layer) for layer in layers])["ablation_loss"].mean(0)
            cost_of = dict(zip(layers, costs, strict=True))
            promise = {site: cost_of[site.layer] for site in sites}
        order = sorted(sites, key=lambda site: -promise[site])
        count = math.ceil(share * len(sites))
        return order[:count], order[count:]


def drawn(sites: list[Site], seed: int) -> list[Site]:
    """A control: a few of the heads that do not lead."""
    return sorted(random.Random(f"control {seed}").sample(sites, min(DRAWN, len(sites))))


def index_of(sites: Sequence[Site]) -> tuple[slice, list[int], list[int]]:
    """Where heads stand in an array (examples, layers, heads)."""
    return slice(None), [site.layer for site in sites], [site.heads[0] for site in sites]
