"""plan.heads: auto. A plan that grows head by head, by what is measured, and stops where the next is not worth its cache.

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

from surgery.errors import UserError
from surgery.loading.opened import Checkpoint
from surgery.locating.planning import plan
from surgery.locating.questions import asked
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.probes.encoded import Asked
from surgery.records.growth import Round, Saved, Trial
from surgery.records.plan import Plan
from surgery.records.recipe import Auto, Data, PlanOptions, Tune
from surgery.records.site import Site
from surgery.runtime.progress import say
from surgery.statistics import LEVEL
from surgery.tuning.bounded import SEED, Bounds, Measured, Measuring, decided, growth_of, saved

CHANNELS = 16  # of a Mamba-1 in a block


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
    options = options or PlanOptions(heads="auto")
    subject = Subject.of(base, tokenizer, verb="grow")
    seed = ranking.provenance.seed if seed is None else seed
    size = CHANNELS if subject.anatomy.ssms[0].width == 1 else 1
    order = blocks(ranking, size, options.auto.max_heads + options.auto.candidates - 1)
    questions = fresh_questions(subject.tokenizer, ranking, options.auto.examples, seed)
    measuring = Measuring.of(
        subject, questions, options.auto, data=data or Data(), tuning=tuning or Tune(), taught=ranking.probe["name"],
        batch_size=batch_size, seed=seed, kept=kept,
    )  # fmt: skip
    return _Growing(measuring, ranking, options, order, seed).grown()


def blocks(ranking: Ranking, size: int, count: int) -> list[Site]:
    """At most `count` blocks of `size` heads of one layer each, in the order in which the ranking fills them. Raises UserError
    for a ranking of a model that cannot be spliced."""
    plan(ranking, 1)  # which refuses those
    heads = ranking.columns
    filling: dict[int, list[int]] = {}
    filled: list[Site] = []
    for i in heads.order():
        if len(filled) == count:
            break
        block = filling.setdefault(int(heads.layer[i]), [])
        block.append(int(heads.head[i]))
        if len(block) == size:
            filled.append(Site(int(heads.layer[i]), tuple(block)))
            block.clear()
    return filled


def fresh_questions(tokenizer: PreTrainedTokenizerBase, ranking: Ranking, n: int, seed: int) -> list[Asked]:
    """At most n questions of a ranking's probe that no head was ranked by. Raises UserError for fewer than two."""
    _, questions = asked(tokenizer, ranking.probe["name"], ranking.probe["options"])
    known = {*questions(ranking.probe["examples"], ranking.probe["seed"])}
    fresh = [question for question in questions(n + len(known), seed + SEED) if question not in known][:n]
    if len(fresh) < 2:
        raise UserError(
            f"plan.heads=auto needs questions that no head was ranked by, and {ranking.probe['name']} has {len(fresh)} of "
            "them; lower locate.examples, or set plan.heads to a number"
        )
    return fresh


class _Growing:
    """The rounds. order: heads, or blocks of them, the leading ones first."""

    def __init__(self, measuring: Measuring, ranking: Ranking, options: PlanOptions, order: list[Site], seed: int):
        self.measuring, self.ranking, self.options, self.order, self.seed = measuring, ranking, options, order, seed
        self.auto: Auto = options.auto
        copies = options.init == "copy"  # which keep a gate of 1
        gates = [each if copies else gate(each) for each in self.auto.gates]
        self.gates: list[float | None] = [options.blend] if options.blend is not None else [*gates]
        self.rounds: list[Round] = []

    def grown(self) -> Plan:
        (base,) = self.measuring.measure([None], "plan, the base")
        self.bounds = Bounds(self.measuring, base, self.auto)
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
        growth = growth_of(self.ranking.probe, self.measuring, base, self.rounds)
        if not sites and self.rounds and all(trial.beyond for trial in self.rounds[0].trials):
            plans = [self._plan([trial.site], trial.blend) for trial in self.rounds[0].trials]
            return decided(self.measuring, self.bounds, plans, growth)  # which shows the frontier
        if not sites:
            raise UserError(
                f"no head is worth its cache: of the {len(self.order)} leading ones none saves {self.auto.least_gain} nats "
                f"(the best, {_best(self.rounds[-1])}); locate with another probe, lower plan.auto.least_gain, or set "
                "plan.heads to a number"
            )
        return decided(self.measuring, self.bounds, self._proposed(sites, blend, allowed), growth)

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
        return [self._plan([*heads], gate_of) for heads, gate_of in chosen]

    def _round(
        self, sites: list[Site], candidates: list[Site], blend: float | None, before: Measured
    ) -> dict[tuple[Site, float | None], Measured]:
        """What is tried: by head and gate."""
        tried: dict[tuple[Site, float | None], Measured] = {}

        def attempt(keys: list[tuple[Site, float | None]]) -> None:
            fresh = [key for key in keys if key not in tried]
            plans = [self._plan([*sites, site], blend) for site, blend in fresh]
            if plans:
                tried.update(zip(fresh, self.measuring.measure(plans, f"plan, head {len(sites) + 1}"), strict=True))

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

    def _plan(self, sites: list[Site], blend: float | None) -> Plan:
        given = self.options.given() | {"heads": 1, "sites": tuple(sites), "blend": blend}
        return plan(self.ranking, **given, seed=self.seed)

    def _saved(self, before: Measured, after: Measured, level: float = LEVEL) -> Saved:
        return saved(before, after, self.auto.text_weight, level)


def gate(value: float) -> float | None:
    """As a plan has it: a gate of 1 is none."""
    return None if value == 1 else value


def most_plans(options: Auto, gates: int, heads: int) -> int:
    """How many plans are measured at most, the base included, in a model of so many heads."""
    rounds, candidates = min(options.max_heads, heads), min(options.candidates, heads)
    return 1 + 2 * options.finalists + gates + rounds * min(candidates * gates, candidates * min(2, gates) + gates)


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
