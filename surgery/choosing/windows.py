"""Which heads of a model's own attention get a window, and how many: those first whose window alone costs questions least, as
long as neither questions nor text lose.

Ablation would not tell: without a head nothing is added, while a head with a window adds what it finds there. Heads replace
each other: of two that retrieve each can go, and not both. So no count is taken that was not measured as a whole; it is found
by halving, as what is lost grows with the count.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.choosing.bounded import Measuring, NoPlan, PlanMeasurement, growth_of
from surgery.choosing.task import ChoiceTask
from surgery.errors import UserError
from surgery.loading.opened import Checkpoint
from surgery.locating.ranking import Ranking
from surgery.locating.skill_scores import TEXT
from surgery.locating.subject import Subject
from surgery.models.cache import cache_after
from surgery.probes.encoded import Asked
from surgery.probes.scoring import batches
from surgery.probes.skills import keeps
from surgery.records.growth import Candidate, Growth
from surgery.records.plan import Plan, PlanWindows, merged
from surgery.records.recipe import CacheBudget, Data, PlanOptions, Tune, WindowOptions
from surgery.records.site import Site
from surgery.runtime.progress import say
from surgery.splicing.splice import install
from surgery.splicing.windows import attention_groups, window_specs


def plan_windows(
    base: Checkpoint, ranking: Ranking, options: PlanOptions, grafts: Plan | None = None, *, data: Data | None = None,
    tuning: Tune | None = None, batch_size: int = 32, seed: int = 0, kept: Path | None = None,
) -> Plan:  # fmt: skip
    """The plan of some grafts, or of none, with the windows that plan.window says. kept: a folder for what is measured.

    Raises UserError where the model's attention can have no windows, and where nothing could be seen on the questions; NoPlan
    where the windows that the budget takes cost too much."""
    subject = Subject.of(base)
    task = ChoiceTask(subject, ranking, options, data or Data(), tuning or Tune(), batch_size, seed, kept)
    return _Windows(task, grafts).plan()  # install() refuses sites that can have none


def check_windows(model: PreTrainedModel, options: WindowOptions) -> None:
    """Find out before anything is located whether its windows can be had. Raises UserError if they cannot."""
    groups = _groups(model)
    if options.sites is not None:
        window_specs(model, PlanWindows(sites=options.sites, first=options.first, length=options.length))
    elif options.groups != "auto" and options.groups > len(groups):
        raise UserError(f"plan.window.groups: the model has {len(groups)} groups of attention heads")


def _groups(model: PreTrainedModel) -> list[Site]:
    if not (groups := attention_groups(model)):
        raise UserError(f"plan.window: a {model.config.model_type} has no attention whose heads could have a window")
    return groups


def check_length(tokenizer: PreTrainedTokenizerBase, questions: Sequence[Asked], options: WindowOptions) -> None:
    """Raise UserError for questions so short that windows would read all of them."""
    longest = max(len(row) for _, each in batches(tokenizer, questions, 64) for row in each.rows)
    if longest <= options.length:
        raise UserError(
            f"plan.window.length: the questions have {longest} tokens at most, and a window of {options.length} reads all of "
            "them, so it would change nothing; lower it, or rank by longer ones"
        )


def least_needed(measuring: Measuring, options: WindowOptions, grafts: Plan | None = None) -> list[Site]:
    """All groups of attention heads, those first whose window alone costs the questions least. Raises UserError where windows
    would read all of them."""
    check_length(measuring.subject.tokenizer, measuring.questions, options)
    groups = _groups(measuring.subject.model)
    alone = measuring.measure([windowed([group], options, grafts) for group in groups], "plan, a window for each group alone")
    return [groups[i] for i in np.argsort([float(each.loss.mean()) for each in alone], kind="stable")]


def windowed(sites: Sequence[Site], options: WindowOptions, grafts: Plan | None = None) -> Plan:
    """The plan of some grafts, or of none, with windows at these sites."""
    windows = PlanWindows(sites=tuple(sites), first=options.first, length=options.length)
    return Plan(kind="window", windows=windows) if grafts is None else grafts.model_copy(update={"windows": windows})


class _Windows:
    """grafts: the plan that the windows are beside, or None. before: what the windows are measured against."""

    def __init__(self, task: ChoiceTask, grafts: Plan | None):
        assert task.options.window is not None
        self.task, self.grafts, self.options = task, grafts, task.options.window
        self.order = [*(self.options.sites or ())]
        self.measured: dict[int, PlanMeasurement] = {}

    @cached_property
    def before(self) -> PlanMeasurement:
        return self._measurement(0)

    def plan(self) -> Plan:
        budget, count = self.task.options.cache_budget, self.options.groups
        if self.options.sites is not None:
            count = len(self.order)
        else:
            check_windows(self.task.subject.model, self.options)
            self.order = least_needed(self.task.measuring, self.options, self.grafts)
        if count != "auto":
            if budget is not None and (size := self._bytes(count)) > budget.bytes:
                raise UserError(
                    f"plan.cache_budget: after {budget.tokens:,} tokens the cache of this plan takes {size:,} bytes"
                )
            return self._complete(count)
        count = self._most() if budget is None else self._fitting(budget)
        if count:
            say(f"plan: windows for {count} of {len(self.order)} groups: {self._line(count)}")
        elif self.grafts is None:
            raise NoPlan(f"no attention head can have a window within the bounds of plan.auto: {self._line(1)}", self._growth())
        chosen = self._complete(count)
        return chosen if chosen.growth is not None else chosen.model_copy(update={"growth": self._growth()})

    def _fitting(self, budget: CacheBudget) -> int:
        """The smallest count whose cache is within the budget. Raises UserError where none is, and NoPlan where it costs more
        than the bounds."""
        most = len(self.order)
        count = bisect_left(range(most + 1), True, key=lambda n: self._bytes(n) <= budget.bytes)
        if count > most:
            raise UserError(
                f"plan.cache_budget: with windows for all heads of attention the cache takes {self._bytes(most):,} bytes after "
                f"{budget.tokens:,} tokens"
            )
        if not count and self.grafts is None:
            raise UserError(f"plan.cache_budget: the model's cache takes {self._bytes(0):,} bytes; nothing has to be done")
        if count and not self._keeps(count):
            raise NoPlan(
                f"plan.cache_budget: it takes windows for {count} of {most} groups, which cost more than the bounds of "
                f"plan.auto allow: {self._line(count)}; widen the budget, or a bound", self._growth(),
            )  # fmt: skip
        return count

    def _complete(self, count: int) -> Plan:
        chosen = self._of(self.order[:count])
        assert chosen is not None
        return chosen

    def _of(self, sites: Sequence[Site]) -> Plan | None:
        """The plan with windows at these sites; None for nothing at all."""
        if not sites:
            return self.grafts
        plan = windowed(sites, self.options, self.grafts)
        if self.grafts is not None:
            return plan
        return plan.model_copy(update={"provenance": self.task.ranking.provenance, "seed": self.task.seed})

    def _most(self) -> int:
        """The largest count that keeps the bounds, by halving."""
        low, high = 0, len(self.order)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._keeps(middle) else (low, middle - 1)
        return low

    def _measurement(self, count: int) -> PlanMeasurement:
        if count not in self.measured:
            plan = self._of(self.order[:count])
            self.measured[count] = self.task.measuring.measure([plan], f"plan, windows for {count} groups")[0]
        return self.measured[count]

    def _keeps(self, count: int) -> bool:
        return not self._candidate(count).beyond

    def _candidate(self, count: int) -> Candidate:
        """What so many windows do, and cost more than the bounds."""
        task, measured = self.task, self._measurement(count)
        bound, beyond = task.options.auto, list(task.bounds.beyond(measured))
        if not keeps(self.before.correct, measured.correct, bound.accuracy_bound):
            beyond.append(task.ranking.probe["name"])
        if TEXT not in beyond and task.bounds.costs_text(measured, self.before):
            beyond.append(TEXT)
        known = task.bounds.candidate(self._complete(count), measured)
        return known.model_copy(update={"sites": merged(self.order[:count]), "beyond": tuple(beyond)})

    def _line(self, count: int) -> str:
        told = self._candidate(count)
        change = told.accuracy - float(self.before.correct.mean())
        return f"accuracy {told.accuracy:.3f} ({change:+.3f}), text {told.text_loss:+.4f} nats"

    def _growth(self) -> Growth:
        growth, bounds = growth_of(self.task.ranking.probe, self.task.measuring, self.task.before), self.task.bounds
        candidates = tuple(self._candidate(count) for count in sorted(self.measured) if count)
        return growth.model_copy(update={"candidates": candidates, "skills": bounds.accuracies(bounds.base)})

    def _bytes(self, count: int) -> int:
        """What the cache takes with so many windows."""
        assert self.task.options.cache_budget is not None
        plan, model = self._of(self.order[:count]), self.task.subject.model
        if plan is not None:
            model = install(model, plan).eval()
        return cache_after(model, self.task.options.cache_budget.tokens)
