"""The leading heads of the ranking. With plan.heads: auto, a plan grows head by head, by what is measured, and stops where the
next head is not worth its cache.

Each round puts candidates, the leading heads of the ranking, one after the other beside those that are in the plan, untrained,
and measures the hybrid on questions that no head was ranked by and on held-out text. What counts is what tuning will minimise:
the loss on both. Heads that serve the text as well want a small gate, so that gates are tried, too: in the first round for the
leading head, in every round for the best one. Heads under one gate share the work, and two need a smaller one than one does: so
candidates are tried under the gate of the plan and under the next smaller one.

A head of Mamba-1 is a channel, and one channel of thousands changes next to nothing. There a candidate is a block: CHANNELS
leading channels of one layer.

The best of many trials looks better than it is. So the interval that has to leave out 0 is corrected for the number of trials
of the round (Bonferroni).
"""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.choosing.bounded import PlanMeasurement, decided, growth_of, saved
from surgery.choosing.task import ChoiceTask, Most, gate_count
from surgery.errors import UserError
from surgery.loading.opened import Checkpoint
from surgery.locating.ranking import Ranking
from surgery.records.growth import Round, Saved, Trial
from surgery.records.plan import Plan
from surgery.records.recipe import Data, PlanOptions, Tune
from surgery.records.site import Site
from surgery.runtime.progress import say
from surgery.statistics import LEVEL


def grow(
    base: PreTrainedModel | Checkpoint, ranking: Ranking, options: PlanOptions | None = None, *,
    tokenizer: PreTrainedTokenizerBase | None = None, data: Data | None = None, tuning: Tune | None = None,
    batch_size: int = 32, seed: int | None = None, kept: Path | None = None,
) -> Plan:  # fmt: skip
    """The plan that heads are added to until the next one is not worth its cache, within the bounds of `plan.auto`.
    plan.growth says what each round measured, and what the last candidates did after a few steps of tuning.

    base: what was ranked; a Checkpoint, or a model with its tokenizer. data: whose training text the windows are held out from,
    and whose skills are not to be lost. tuning: how the plan will be tuned. batch_size: questions in a forward. seed: the
    ranking's, unless given. kept: a folder for what is measured; what is there already is not measured again. Several processes
    share the plans of a round.

    Raises UserError for a ranking of a model that cannot be spliced, and where no head is worth its cache; NoPlan where none is
    within the bounds.
    """
    return _Growing(
        ChoiceTask.of(
            base, ranking, options or PlanOptions(heads="auto"), verb="grow", tokenizer=tokenizer, data=data, tuning=tuning,
            batch_size=batch_size, seed=seed, kept=kept,
        )
    ).grown()  # fmt: skip


def choose(task: ChoiceTask) -> Plan:
    """As many heads as are worth their cache. Where plan.heads is a number, nothing has to be measured
    (locating/planning.py)."""
    return _Growing(task).grown()


def most(options: PlanOptions, heads: int, bounded: bool) -> Most:
    """The base included, and the finalists untrained once more."""
    auto, gates = options.auto, gate_count(options)
    rounds, candidates = min(auto.max_heads, heads), min(auto.candidates, heads)
    measured = 1 + gates + rounds * min(candidates * gates, candidates * min(2, gates) + gates)
    return Most(measured + 2 * auto.finalists, auto.finalists if bounded else 0)


class NoGain(UserError):
    """No head gains enough untrained."""


class _Growing:
    """The rounds. order: heads, or blocks of them, the leading ones first."""

    def __init__(self, task: ChoiceTask):
        self.task, self.options, self.auto = task, task.options, task.options.auto
        self.order = task.units(count=self.auto.max_heads + self.auto.candidates - 1)
        self.gates = [*reversed(task.gates)]
        self.rounds: list[Round] = []

    def grown(self) -> Plan:
        base, self.bounds, measuring = self.task.before, self.task.bounds, self.task.measuring
        sites: list[Site] = []
        before, blend = base, None
        allowed: dict[tuple[tuple[Site, ...], float | None], float] = {}  # plans within the bounds -> what they save
        while len(sites) < self.auto.max_heads:
            candidates = [site for site in self.order if site not in sites][: self.auto.candidates]
            if not candidates:
                break
            tried = self._round(sites, candidates, blend, before)
            trials = [
                Trial(site=site, blend=gate_of, saved=self._saved(before, measured), **self.bounds.figures(measured))
                for (site, gate_of), measured in tried.items()
            ]
            within = [i for i, trial in enumerate(trials) if not trial.beyond]
            for ((site, gate_of), measured), trial in zip(tried.items(), trials, strict=True):
                if not trial.beyond:
                    allowed[(*sites, site), gate_of] = self._saved(base, measured).value
            best = max(within or range(len(trials)), key=lambda i: trials[i].saved.value)
            (site, gate_of), measured = [*tried.items()][best]
            least = self._saved(before, measured, LEVEL / len(trials)).ci95[0]
            added = bool(within) and least > 0 and trials[best].saved.value >= self.auto.least_gain
            self.rounds.append(Round(trials=tuple(trials), best=best, added=added))
            say(_line(self.rounds, len(sites)))
            if not added:
                break
            sites, before, blend = [*sites, site], measured, gate_of
        growth = growth_of(self.task.ranking.probe, measuring, base, self.rounds)
        if not sites and self.rounds and all(trial.beyond for trial in self.rounds[0].trials):
            plans = [self.task.plan([trial.site], trial.blend) for trial in self.rounds[0].trials]
            return decided(measuring, self.bounds, plans, growth)  # which shows the frontier
        if not sites:
            raise NoGain(
                f"no head is worth its cache: of the {len(self.order)} leading ones none saves {self.auto.least_gain} nats "
                f"(the best, {_best(self.rounds[-1])}); locate with another probe, lower plan.auto.least_gain, or set "
                "plan.heads to a number"
            )
        return decided(measuring, self.bounds, self._proposed(sites, blend, allowed), growth)

    def _proposed(
        self, sites: list[Site], blend: float | None, allowed: dict[tuple[tuple[Site, ...], float | None], float]
    ) -> list[Plan]:
        """The plan that has grown, and others that a few steps of tuning may prefer: the best of each other set of heads that
        was tried within the bounds, one a layer first."""
        grown = (tuple(sites), blend)
        others: dict[tuple[Site, ...], float | None] = {}
        for (heads, gate_of), _ in sorted(allowed.items(), key=lambda each: -each[1]):
            others.setdefault(heads, gate_of)
        others.pop(grown[0], None)
        layers = {site.layer for site in sites}
        order = sorted(others, key=lambda heads: {site.layer for site in heads} == layers)  # stable: by what they save
        chosen = [grown, *((heads, others[heads]) for heads in order)][: self.auto.finalists]
        return [self.task.plan([*heads], gate_of) for heads, gate_of in chosen]

    def _round(
        self, sites: list[Site], candidates: list[Site], blend: float | None, before: PlanMeasurement
    ) -> dict[tuple[Site, float | None], PlanMeasurement]:
        """What is tried: by head and gate."""
        tried: dict[tuple[Site, float | None], PlanMeasurement] = {}

        def attempt(keys: list[tuple[Site, float | None]]) -> None:
            fresh = [key for key in keys if key not in tried]
            plans = [self.task.plan([*sites, site], blend) for site, blend in fresh]
            if plans:
                tried.update(zip(fresh, self.task.measuring.measure(plans, f"plan, head {len(sites) + 1}"), strict=True))

        def best() -> tuple[Site, float | None]:
            within = [key for key in tried if not self.bounds.beyond(tried[key])]
            return max(within or tried, key=lambda key: self._saved(before, tried[key]).value)

        if not sites:
            attempt([(candidates[0], gate) for gate in self.gates])
            blend = best()[1]
        attempt([(site, gate) for gate in self._near(blend) for site in candidates])
        attempt([(best()[0], gate) for gate in self.gates])
        return tried

    def _near(self, blend: float | None) -> list[float | None]:
        """The gate, and the next smaller one."""
        order = sorted(self.gates, key=lambda gate: -(1 if gate is None else gate))
        return order[order.index(blend) :][:2]

    def _saved(self, before: PlanMeasurement, after: PlanMeasurement, level: float = LEVEL) -> Saved:
        return saved(before, after, self.auto.text_weight, level)


def _line(rounds: list[Round], count: int) -> str:
    """What a round found, in words."""
    last = rounds[-1]
    if last.added:
        return f"plan: head {count + 1}, {_best(last)}"
    return f"plan: another head is not worth its cache (the best, {_best(last)})"


def _best(last: Round) -> str:
    trial = last.trials[last.best]
    how = "" if trial.blend is None else f" under a gate of {trial.blend:g}"
    low, high = trial.saved.ci95
    heads = f"{len(trial.site.heads)} channels of L{trial.site.layer}" if len(trial.site.heads) > 1 else f"{trial.site}"
    return f"{heads}{how}, saves {trial.saved.value:+.3f} nats [{low:+.3f}, {high:+.3f}]: accuracy {trial.accuracy:.3f}"
