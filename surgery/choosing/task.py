"""What every way of choosing is given, and what becomes of the heads that it proposes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.choosing.bounded import SEED, Bounds, Measuring, PlanMeasurement, decided, growth_of
from surgery.errors import UserError
from surgery.loading.opened import Checkpoint
from surgery.locating.heads import KINDS
from surgery.locating.planning import plan
from surgery.locating.questions import asked
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.probes.encoded import Asked
from surgery.records.plan import Plan
from surgery.records.recipe import Data, PlanOptions, Tune
from surgery.records.site import Site

CHANNELS = 16  # of a Mamba-1 in a block: one channel of thousands changes next to nothing


class Most(NamedTuple):
    """What a way measures at most. plans: on questions, text and the other skills. tuned: plans that are tuned for
    plan.auto.steps steps. asked: sets of heads that are measured on questions alone."""

    plans: int
    tuned: int = 0
    asked: int = 0


@dataclass(frozen=True, eq=False)
class ChoiceTask:
    """A ranked model, and what the plan is for. data: whose training text the windows are held out from, and whose skills are
    not to be lost. tuning: how the plan will be tuned. batch_size: questions in a forward. kept: a folder for what is measured;
    what is there already is not measured again."""

    subject: Subject
    ranking: Ranking
    options: PlanOptions
    data: Data
    tuning: Tune
    batch_size: int
    seed: int
    kept: Path | None = None

    @classmethod
    def of(
        cls, base: PreTrainedModel | Checkpoint, ranking: Ranking, options: PlanOptions, *, verb: str = "plan",
        tokenizer: PreTrainedTokenizerBase | None = None, data: Data | None = None, tuning: Tune | None = None,
        batch_size: int = 32, seed: int | None = None, kept: Path | None = None,
    ) -> Self:  # fmt: skip
        """base: what was ranked; a Checkpoint, or a model with its tokenizer. seed: the ranking's, unless given. Raises
        UserError for a ranking of a model that cannot be spliced."""
        plan(ranking, 1)  # which refuses those
        subject = Subject.of(base, tokenizer, verb=verb)
        seed = ranking.provenance.seed if seed is None else seed
        return cls(subject, ranking, options, data or Data(), tuning or Tune(), batch_size, seed, kept)

    @cached_property
    def questions(self) -> list[Asked]:
        """Of the ranking's probe, at most plan.auto.examples that no head was ranked by. Raises UserError for fewer than
        two."""
        probe = self.ranking.probe
        _, questions = asked(self.subject.tokenizer, probe["name"], probe["options"])
        known = {*questions(probe["examples"], probe["seed"])}
        n = self.options.auto.examples
        fresh = [question for question in questions(n + len(known), self.seed + SEED) if question not in known][:n]
        if len(fresh) < 2:
            raise UserError(
                f"plan.heads=auto and plan.by need questions that the ranking did not use, and {probe['name']} has "
                f"{len(fresh)} of them; lower locate.examples, or set plan.heads to a number"
            )
        return fresh

    @cached_property
    def measuring(self) -> Measuring:
        return Measuring.of(
            self.subject, self.questions, self.options.auto, data=self.data, tuning=self.tuning,
            taught=self.ranking.probe["name"], batch_size=self.batch_size, seed=self.seed, kept=self.kept,
        )  # fmt: skip

    @cached_property
    def before(self) -> PlanMeasurement:
        """The base."""
        return self.measuring.base

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.measuring, self.before, self.options.auto)

    @property
    def gates(self) -> list[float | None]:
        """Those that are tried, the largest first: attention instead of the SSM is no gate."""
        if self.options.blend is not None:
            return [self.options.blend]
        copies = self.options.init == "copy"  # which keep a gate of 1
        return [each if copies else gate(each) for each in sorted(self.options.auto.gates, reverse=True)]

    @property
    def size(self) -> int:
        """Of a unit that heads are counted in: a head, or a block of channels."""
        return CHANNELS if self.subject.anatomy.ssms[0].width == 1 and self.options.grows else 1

    def units(self, order: np.ndarray | None = None, count: int | None = None) -> list[Site]:
        """At most `count` units (all, unless given), each of one layer, as an order of the ranking's heads fills them (the
        ranking's own, unless given)."""
        heads = self.ranking.columns
        filling: dict[int, list[int]] = {}
        filled: list[Site] = []
        graftable = {*self.graftable().tolist()}
        for i in (heads.order() if order is None else order).tolist():
            if i not in graftable:
                continue
            if len(filled) == count:
                break
            unit = filling.setdefault(int(heads.layer[i]), [])
            unit.append(int(heads.head[i]))
            if len(unit) == self.size:
                filled.append(Site(int(heads.layer[i]), tuple(unit)))
                unit.clear()
        return filled

    def measured(self, score: str) -> np.ndarray:
        """(heads,): a score of the ranking, in the ranking's order, the least where it was not measured. Raises UserError
        where it was of no head."""
        heads = self.ranking.columns
        if not heads.measured(score).any():
            raise UserError(f"plan.by={self.options.by}: the ranking has no {score}; locate with locate.exact=true")
        return np.nan_to_num(heads.values(score), nan=-np.inf)

    def graftable(self) -> np.ndarray:
        """The numbers of the ranking's heads that a graft can take: of an SSM."""
        heads = self.ranking.columns
        return np.flatnonzero(heads.kind != KINDS.index("attention"))

    def plan(self, sites: Sequence[Site], blend: float | None) -> Plan:
        """The plan of some heads under a gate, each with the start that locate found best for it."""
        given = self.options.given() | {"heads": 1, "sites": tuple(sites), "blend": blend}
        return plan(self.ranking, **given, seed=self.seed)

    def chosen(self, units: Sequence[Site]) -> Plan:
        """The best plan within the bounds of the leading units, under one gate: all that plan.heads allows, and where skills
        are to be kept, half of them and the first alone as well. Raises NoPlan where none is within the bounds."""
        units = units[: self.options.counted]
        if not (self.measuring.skills or self.options.grows):
            return self.plan(units, self.options.blend)
        return self.decided([self.plan(units[:count], each) for count in counts(len(units)) for each in self.gates])

    def decided(self, plans: Sequence[Plan]) -> Plan:
        """The best within the bounds of some plans, the preferred ones first. Raises NoPlan where none is."""
        growth = growth_of(self.ranking.probe, self.measuring, self.before)
        return decided(self.measuring, self.bounds, plans, growth, by_preference=True)


def most_chosen(options: PlanOptions, heads: int, bounded: bool) -> Most:
    """What ChoiceTask.chosen measures at most, the base included."""
    if not (bounded or options.grows):
        return Most(0)
    plans = len(counts(min(options.counted, heads))) * gate_count(options)
    return Most(1 + plans + options.auto.finalists, options.auto.finalists)


def gate_count(options: PlanOptions) -> int:
    """How many gates are tried."""
    return len(options.auto.gates) if options.blend is None else 1


def counts(units: int) -> list[int]:
    """How many of the leading units are tried together: all, half, one."""
    return sorted({units, -(-units // 2), 1}, reverse=True)


def gate(value: float) -> float | None:
    """As a plan has it: a gate of 1 is none."""
    return None if value == 1 else value
