"""Which heads? Every way of choosing (surgery/choosing), with equal numbers of heads and equal tuning, on several bases.

A base is ranked, each way chooses its heads, and what is compared is the model after tuning: on dictionaries with keys not used
in tuning, with keys of its training examples, and on held-out text. Where heads are located on recall hits, it is compared on
the hits of further texts, each of which is a unit. Each way gets the cheapest ranking that it can do with, and
what ranking and choosing cost is counted in passes through the model. Ways that choose the same heads share one tuned model.
Nothing bounds the plans, so that all have as many heads: what is compared is the heads, and not how many are taken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from surgery.choosing import DEFAULT, check_way, names
from surgery.choosing.bounded import Measuring, PlanMeasurement
from surgery.errors import UserError
from surgery.evaluation.cells import Kept, kept
from surgery.evaluation.results import value
from surgery.evaluation.task import bench_seed
from surgery.figures import plotting
from surgery.jobs.locating_stage import RANKING, located
from surgery.jobs.opening import open_checkpoint
from surgery.jobs.planning_stage import planned
from surgery.loading.opened import Checkpoint
from surgery.locating.questions import asked
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.probes.encoded import Asked
from surgery.probes.kv import KVRetrieval
from surgery.probes.question import Passage
from surgery.records.names import strip_paths
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, changed
from surgery.records.sections.section import Count
from surgery.runtime.ownership.files import remove
from surgery.runtime.processes import on_main
from surgery.runtime.progress import say
from surgery.statistics import Estimate, Proportion, difference, mean, over_documents, proportion
from surgery.studies.passes import PassCounter, Passes
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects
from surgery.tuning.batches import held_out_windows

BASE, CHOICE = "base", "choice"
UNSEEN, LOSS, SEEN, TEXT = "unseen keys", "loss on unseen keys", "keys of the lessons", "loss on text"
HITS, SAVED = "loss on recall hits", "nats saved on recall hits"
CHANGE, AGAINST = ", change", f", against {DEFAULT}"
GAINS = (UNSEEN + CHANGE, SAVED)  # what a base's ways are compared by: one of them
EXACT = ("gain", "ablation")  # ways that need every head measured by itself; for the others attribution ranks
DRAWN = ("random", "layer")  # ways that draw lots; their points are hollow
NEARLY = 0.9  # of the largest gain
OF, HEADS = ": ", " heads"  # between a base, a way and a number of heads, in the name of a row
COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#24292F", "#8C564B", "#7F7F7F", "#B8A800", "#6A3D9A",
    "#E15759",
)  # fmt: skip
SPACE, FEW = 0.055, 5  # between labels, as a part of the axis; bases that are named
TOUCHING = 0.25  # powers of ten between labels that touch
SEED = 20_011  # of the windows of text, added to the recipe's: choosing has others
OWN = ("model", "heads", "ways", "texts")  # the keys of a base that are no section of a recipe


class ChosenPlan(Kept):
    """What a way chose, and what it cost."""

    plan: Plan
    passes: Passes


class RankingCost(Kept):
    """What a ranking cost."""

    passes: Passes


class Ways(Study):
    """bases: name -> its `model` (by default checkpoints/<name>), what it changes of the recipe's sections, key by key, and,
    where they differ, `heads` and `ways`; for a base that is located on recall hits also `texts`, two files or more. heads:
    numbers of heads. ways: those compared; by default all. draws: how often ways that draw lots do so. seeds: of tuning,
    beginning with the recipe's; each draw is tuned with one of them, in turn. bench.limit dictionaries of the largest of
    bench.pairs are asked, or rows of each text, and bench.windows windows of text."""

    title: ClassVar[str] = "Ways of choosing heads: what they gain after the same tuning, and what choosing costs"

    bases: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], dict[str, Any]] = Field(min_length=1)
    heads: tuple[Count, ...] = Field(default=(1, 2, 4), min_length=1)
    ways: tuple[str, ...] | None = Field(default=None, min_length=1)
    draws: dict[Literal["random", "layer"], Count] = {"random": 5, "layer": 3}
    seeds: Count = 1

    def check(self, recipe: Recipe) -> None:
        for name in self.bases:
            for way in self.ways_of(name):
                check_way(way)
            if not isinstance(heads := self.bases[name].get("heads", self.heads), list | tuple) or not heads:
                raise UserError(f"study.bases.{name}.heads: numbers of heads, such as [1, 2, 4]")
            job = self.job(recipe, name)
            if job.tune.steps == "auto" or not job.tune.steps:
                raise UserError(
                    f"the study 'ways' compares plans after equal tuning: set tune.steps to a number (study.bases.{name})"
                )
            if (job.locate.probe == "hits") != (len(self.texts_of(name)) > 1):
                raise UserError(
                    f"study.bases.{name}.texts: two files or more where locate.probe is hits, and none with another probe: "
                    "their recall hits are what plans are compared on"
                )
            if self.texts_of(name) and CHOICE in self.ways_of(name):
                raise UserError(
                    f"study.bases.{name}.ways: name those to compare; '{CHOICE}' needs a probe that says where answers are"
                )
            if job.data.skills:
                raise UserError(
                    "the study 'ways' compares plans with equal numbers of heads, which nothing bounds: data.skills=[]"
                )

    def ways_of(self, base: str) -> list[str]:
        """The default first: others are compared with it."""
        chosen = self.bases[base].get("ways", self.ways) or names()
        return sorted(chosen, key=lambda way: way != DEFAULT)

    def heads_of(self, base: str) -> list[int]:
        """The largest number first: what choosing costs is told of it."""
        return sorted(self.bases[base].get("heads", self.heads), reverse=True)

    def texts_of(self, base: str) -> list[str]:
        """Of whose hits the loss is compared; none for a base that is asked dictionaries."""
        return [*self.bases[base].get("texts", ())]

    def job(self, recipe: Recipe, name: str) -> Recipe:
        """The recipe of a base."""
        changes = {key: value for key, value in self.bases[name].items() if key not in OWN}
        model = self.bases[name].get("model", f"checkpoints/{name}")
        return changed(recipe, **changes, model=model, study=None, tokenizer=None)

    def measure(self, subjects: Subjects) -> Measurements:
        rows: list[Row] = []
        about: dict[str, Any] = {}
        for name in self.bases:
            say(f"{name}: ways of choosing")
            compared = _Compared(self, name, self.job(subjects.recipe, name), subjects.out / name)
            rows += compared.rows()
            about[name] = compared.about
        return Measurements(about=about, summary=_summary(about, rows), rows=tuple(rows))

    @staticmethod
    def table(findings: Findings) -> tuple[list[str], list[list[str]]]:
        """A row for each way: its mean gain over the bases by number of heads, its cost, and in how many cases it is surely
        better or worse than the default."""
        counts = _counts(findings.rows)
        header = ["plan.by", *(f"{count}{HEADS if count > 1 else ' head'}" for count in counts)]
        header += [f"better, worse than {DEFAULT}", f"{TEXT}, nats", "forwards", "backwards", "seconds"]
        body = []
        for way in _ways(findings.rows):
            cells = [_mean_gain(findings.rows, way, count) for count in counts]
            each = [beside_default(findings.about, row) for row in _of(findings.rows, way)]
            each = [sign for sign in each if sign is not None]
            decided = f"{each.count(1)}, {each.count(-1)} of {len(each)}" if each else ""
            text = float(np.mean([value(row.figures[TEXT + CHANGE]) for row in _of(findings.rows, way)]))
            taken = costs(findings.about, way)
            body.append([
                way, *("" if math.isnan(cell) else f"{cell:+.3f}" for cell in cells), decided, f"{text:+.3f}",
                *(f"{cost:,.0f}" for cost in taken),
            ])  # fmt: skip
        return header, body

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        draw_ways(findings, path)


@dataclass(eq=False)
class _Compared:
    """A base, and what becomes of it with the heads of each way. What was measured is in `out`."""

    study: Ways
    name: str
    recipe: Recipe
    out: Path

    def __post_init__(self) -> None:
        self.base: Checkpoint = open_checkpoint(self.recipe)
        self.subject = Subject.of(self.base, known_fingerprint=self.base.fingerprint)
        self.rankings: dict[bool, tuple[Ranking, Passes]] = {}
        self.texts = self.study.texts_of(self.name)
        self.about: dict[str, Any] = {"seeds": self.study.seeds}
        self.about |= {"texts": self.texts} if self.texts else {"size": self.recipe.bench.pairs[-1]}
        self.about |= {"sites": {}, "cost": {}, "gains": {}}

    @cached_property
    def passages(self) -> list[list[Passage]]:
        """Rows of each text. Raises UserError where one has no hits."""
        options, bench = self.recipe.locate.options, self.recipe.bench
        probes = [asked(self.subject.tokenizer, "hits", {**options, "source": text})[0] for text in self.texts]
        return [probe.passages(bench.limit, bench_seed(self.recipe.seed)) for probe in probes]

    @cached_property
    def measuring(self) -> list[Measuring]:
        """One for each seed of tuning, on the same questions and text."""
        recipe, seed = self.recipe, bench_seed(self.recipe.seed)
        size, limit, tokenizer = recipe.bench.pairs[-1], recipe.bench.limit, self.subject.tokenizer
        questions: list[Asked] = [*chain(*self.passages)]
        skills = {} if self.texts else {SEEN: KVRetrieval(size, "lessons").questions(limit, seed)}
        text = held_out_windows(tokenizer, recipe.data, recipe.tune, recipe.bench.windows, recipe.seed + SEED)
        return [
            Measuring(
                self.subject, questions or KVRetrieval(size, "unseen").questions(limit, seed), text, recipe.bench.batch_size,
                self.out / "tuned", skills=skills, tuning=recipe.tune, data=recipe.data, seed=recipe.seed + number,
            )
            for number in range(self.study.seeds)
        ]  # fmt: skip

    def ranking(self, exact: bool) -> tuple[Ranking, Passes]:
        """With what it cost."""
        if exact not in self.rankings:
            out = self.out / ("exact" if exact else "attribution")
            recipe = changed(self.recipe, locate={"exact": exact, "layers": False})
            ranked: list[Ranking] = []

            def rank() -> RankingCost:
                if (out / RANKING).exists():
                    on_main(lambda: remove(out / RANKING))  # or only a part of it would be counted
                counter = PassCounter(self.subject)
                with counter.counted():
                    ranked.append(located(recipe, self.base, out, figures=False, subject=self.subject))
                return RankingCost(passes=counter.passes())

            cost = kept(self.out / "costs", self._key(recipe, ranked="exact" if exact else "attribution"), RankingCost, rank)
            self.rankings[exact] = (
                ranked[0] if ranked else located(recipe, self.base, out, resume=True, figures=False, subject=self.subject),
                cost.passes,
            )
        return self.rankings[exact]

    def choice(self, way: str, count: int, draw: int, measured: Path) -> ChosenPlan:
        """measured: a folder that all numbers of heads share."""
        recipe = changed(self.recipe, plan={"by": way, "heads": count})
        ranking, ranked = self.ranking(way in EXACT)

        def choose() -> ChosenPlan:
            counter = PassCounter(self.subject)
            with counter.counted():
                plan = planned(recipe, self.base, ranking, measured, recipe.seed + draw)
            own, before = counter.passes(), ranked
            both = {name: round(getattr(own, name) + getattr(before, name), 1) for name in Passes.model_fields}
            # Ways that choose the same heads are the same model: nothing else of the plan may differ.
            same: dict[str, Any] = {"seed": recipe.seed, "growth": None, "at_risk": {}, "provenance": None}
            plan = plan.model_copy(update=same if recipe.tune.hints else same | {"places": {}})
            return ChosenPlan(plan=plan, passes=Passes(**both))

        return kept(self.out / "costs", self._key(recipe, draw=draw), ChosenPlan, choose)

    def _key(self, recipe: Recipe, **more: Any) -> dict[str, Any]:
        settings = strip_paths(recipe.model_dump(mode="json", include={"seed", "data", "locate", "plan", "tune"}))
        return {"conditions": self.subject.conditions.model_dump(), "recipe": settings, **more}

    def rows(self) -> list[Row]:
        """The base's, then each way's by number of heads."""
        (before,) = self.measured(None, slice(1))
        figures: dict[str, Proportion | Estimate] = {TEXT: mean(before.text)}
        if self.texts:
            figures[HITS] = over_documents(self.by_text(before)).mean
        else:
            figures |= {UNSEEN: proportion(before.correct), LOSS: mean(before.loss), SEEN: proportion(before.skills[SEEN])}
        rows = [Row(what=f"{self.name}{OF}{BASE}", figures=figures)]
        default: dict[int, PlanMeasurement] = {}
        for way in self.study.ways_of(self.name):
            with TemporaryDirectory() as measured:
                for count in self.study.heads_of(self.name):
                    draws = range(self.study.draws.get(way, 1))  # type: ignore[call-overload]
                    choices = [self.choice(way, count, draw, Path(measured)) for draw in draws]
                    by_draw = [self.measured(choice.plan, self.seeds_of(way, draw)) for draw, choice in enumerate(choices)]
                    gains = [[self.gain(before, seed) for seed in seeds] for seeds in by_draw]
                    tuned = _averaged([_averaged(seeds) for seeds in by_draw])
                    default.setdefault(count, tuned)
                    against = default[count] if DEFAULT in self.study.ways_of(self.name) and way != DEFAULT else None
                    rows.append(Row(what=f"{self.name}{OF}{way}, {count}{HEADS}", figures=self.figures(before, tuned, against)))
                    sites = [list(map(str, choice.plan.sites)) for choice in choices]
                    self.about["sites"].setdefault(way, {})[str(count)] = sites
                    self.about["gains"].setdefault(way, {})[str(count)] = gains  # by draw and seed
                    self.about["cost"].setdefault(way, choices[0].passes.model_dump())  # of the largest number
        return rows

    def by_text(self, measured: PlanMeasurement) -> np.ndarray:
        """(texts,): the mean loss (nats) of each text's hits."""
        ends = np.cumsum([len(rows) for rows in self.passages])[:-1]
        sums = [
            np.divide(losses, [row.weight for row in rows]).sum()
            for losses, rows in zip(np.split(measured.loss, ends), self.passages, strict=True)
        ]
        return np.array(sums) / [sum(len(row.hits) for row in rows) for rows in self.passages]

    def gain(self, before: PlanMeasurement, tuned: PlanMeasurement) -> float:
        """What is compared, as one number."""
        if self.texts:
            return float((self.by_text(before) - self.by_text(tuned)).mean())
        return float(tuned.correct.mean() - before.correct.mean())

    def figures(
        self, before: PlanMeasurement, tuned: PlanMeasurement, against: PlanMeasurement | None
    ) -> dict[str, Proportion | Estimate]:
        """Paired differences to the base, and to the plan of the default. A text is a unit."""
        figures: dict[str, Proportion | Estimate] = {TEXT + CHANGE: difference(before.text, tuned.text)}
        for end, other in ((CHANGE, before), (AGAINST, against)):
            if other is not None and self.texts:
                saves = over_documents(self.by_text(other) - self.by_text(tuned))
                figures[SAVED if other is before else SAVED + end] = saves.mean
            elif other is not None:
                figures |= {
                    UNSEEN + end: difference(other.correct, tuned.correct),
                    LOSS + end: difference(other.loss, tuned.loss),
                    SEEN + end: difference(other.skills[SEEN], tuned.skills[SEEN]),
                    TEXT + end: difference(other.text, tuned.text),
                }
        return figures

    def seeds_of(self, way: str, draw: int) -> slice:
        """Every plan is tuned with all seeds; one of several draws with one of them, in turn."""
        number = draw % self.study.seeds
        return slice(number, number + 1) if self.study.draws.get(way, 1) > 1 else slice(None)  # type: ignore[call-overload]

    def measured(self, plan: Plan | None, seeds: slice) -> list[PlanMeasurement]:
        """The base, or its tuned models by seed of tuning."""
        steps = 0 if plan is None else int(self.recipe.tune.steps)
        what = "the base" if plan is None else ", ".join(map(str, plan.sites))
        return [each.measure([plan], f"{self.name}, {what}", steps)[0] for each in self.measuring[seeds]]


def _averaged(measured: Sequence[PlanMeasurement]) -> PlanMeasurement:
    """Question by question, over draws or seeds."""
    if len(measured) == 1:
        return measured[0]
    return PlanMeasurement(
        loss=np.mean([each.loss for each in measured], 0),
        correct=np.mean([each.correct for each in measured], 0),
        text=np.mean([each.text for each in measured], 0),
        seconds=sum(each.seconds for each in measured),
        skills={name: np.mean([each.skills[name] for each in measured], 0) for name in measured[0].skills},
    )


def gain(figures: Mapping[str, Proportion | Estimate]) -> float:
    """Of a row: in accuracy on unseen keys, or in nats saved on recall hits."""
    return value(next(figures[name] for name in GAINS if name in figures))


def beside_default(about: Mapping[str, Any], row: Row) -> int | None:
    """1 if a row gains more than the default with as many heads, by the paired interval and with each seed of tuning; -1 if
    less; else 0. None for the default's own, and where it was not compared. Of several draws the interval alone decides."""
    against = next((row.figures[name] for name in (UNSEEN + AGAINST, SAVED + AGAINST) if name in row.figures), None)
    if against is None:
        return None
    sign = 1 if against.ci95[0] > 0 else -1 if against.ci95[1] < 0 else 0
    base, way, count = _way(row)
    mine, default = (about[base]["gains"][each][str(count)] for each in (way, DEFAULT))
    alike = len(mine) > 1 or all(sign * (one - other) > 0 for one, other in zip(mine[0], default[0], strict=True))
    return sign if alike else 0


def _way(row: Row) -> tuple[str, str, int]:
    """(base, way, number of heads) of a row; (base, "base", 0)."""
    base, _, rest = row.what.partition(OF)
    way, _, count = rest.removesuffix(HEADS).rpartition(", ")
    return (base, way, int(count)) if way else (base, BASE, 0)


def _ways(rows: Sequence[Row]) -> list[str]:
    """The one with the largest mean gain first, over what all have been measured on."""
    ways = [way for way in dict.fromkeys(_way(row)[1] for row in rows) if way != BASE]
    return sorted(ways, key=lambda way: -np.mean(common_gains(rows, way) or [0]))


def common_gains(rows: Sequence[Row], way: str) -> list[float]:
    """Of a way, on the bases and numbers of heads that all ways were measured on."""
    cases: dict[str, set[tuple[str, int]]] = {}
    for base, each, count in map(_way, rows):
        cases.setdefault(each, set()).add((base, count))
    common = set.intersection(*(found for each, found in cases.items() if each != BASE))
    return [gain(row.figures) for row in _of(rows, way) if (_way(row)[0], _way(row)[2]) in common]


def _counts(rows: Sequence[Row]) -> list[int]:
    return sorted({count for _, way, count in map(_way, rows) if way != BASE})


def _of(rows: Sequence[Row], way: str) -> list[Row]:
    return [row for row in rows if _way(row)[1] == way]


def _mean_gain(rows: Sequence[Row], way: str, count: int) -> float:
    """Over the bases with so many heads; NaN where there is none."""
    found = [gain(row.figures) for row in _of(rows, way) if _way(row)[2] == count]
    return float(np.mean(found)) if found else math.nan


def costs(about: Mapping[str, Any], way: str) -> list[float]:
    """Of choosing the largest number of heads, ranking included: the means over the bases."""
    costs = [base["cost"][way] for base in about.values() if way in base["cost"]]
    return [float(np.mean([cost[name] for cost in costs])) for name in Passes.model_fields]


def agreement(about: Mapping[str, Any], one: str, other: str) -> tuple[float, float]:
    """(the share of heads, the share of layers) that two ways choose alike, over bases, numbers of heads and draws: what they
    have in common by what one of them has."""
    heads, layers = [], []
    for base in about.values():
        for count in {*base["sites"].get(one, {})} & {*base["sites"].get(other, {})}:
            for first in base["sites"][one][count]:
                for second in base["sites"][other][count]:
                    a, b = _heads(first), _heads(second)
                    heads.append(len(a & b) / max(len(a), len(b)))
                    layers.append(sum(min([x[0] for x in a].count(n), [x[0] for x in b].count(n)) for n in {x[0] for x in a})
                                  / max(len(a), len(b)))  # fmt: skip
    return float(np.mean(heads)), float(np.mean(layers))


def _heads(sites: Sequence[str]) -> set[tuple[str, str]]:
    """(layer, head) of sites as text."""
    return {(layer, head) for site in sites for layer, _, heads in [site.partition(".H")] for head in heads.split(",")}


def _summary(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A sentence for each way, the best first."""
    lines = []
    for way in _ways(rows):
        gains = [gain(row.figures) for row in _of(rows, way)]
        sentence = f"{way}: {_what(rows)} {np.mean(gains):+.3f} on average of {len(gains)} cases, "
        sentence += f"{min(gains):+.3f} to {max(gains):+.3f}"
        forwards, backwards, _ = costs(about, way)
        sentence += f"; {forwards:,.0f} forward and {backwards:,.0f} backward passes"
        if way != DEFAULT and DEFAULT in _ways(rows):
            heads, layers = agreement(about, way, DEFAULT)
            sentence += f"; {heads:.0%} of the heads and {layers:.0%} of the layers of {DEFAULT}"
        lines.append(f"{sentence}.")
    return "\n".join(lines)


def _what(rows: Sequence[Row]) -> str:
    """What is gained."""
    return SAVED if any(SAVED in row.figures for row in rows) else UNSEEN


def by_number(rows: Sequence[Row]) -> tuple[list[str], list[int], dict[str, list[float]]]:
    """(bases, numbers of heads, way -> mean gain for each number), over the bases that were measured with several numbers of
    heads, and for those numbers that all of them share."""
    numbers: dict[str, set[int]] = {}
    for base, way, count in map(_way, rows):
        numbers.setdefault(base, set()).update({count} if way != BASE else ())
    bases = [base for base, each in numbers.items() if len(each) > 1]
    counts = sorted(set.intersection(*(numbers[base] for base in bases))) if bases else []
    means = {}
    for way in _ways(rows):
        of = {(_way(row)[0], _way(row)[2]): gain(row.figures) for row in _of(rows, way)}
        if all((base, count) in of for base in bases for count in counts):
            means[way] = [float(np.mean([of[base, count] for base in bases])) for count in counts]
    return bases, counts, means


def draw_ways(findings: Findings, path: Path) -> None:
    """A point a way: its mean gain, over the cases that all ways were measured on, against the passes that choosing costs.
    Beside it a line a way: its mean gain against the number of heads."""
    ways = _ways(findings.rows)
    gains = {way: float(np.mean(common_gains(findings.rows, way) or [0])) for way in ways}
    passes = {way: max(1.0, sum(costs(findings.about, way)[:2])) for way in ways}
    bases, counts, means = by_number(findings.rows)
    colors = dict(zip(ways, COLORS * len(ways), strict=False))
    prose = _what(findings.rows) == SAVED
    label = SAVED if prose else "gain in accuracy on unseen keys"
    panels = 2 if len(counts) > 1 else 1
    with plotting.drawing(path, columns=panels, width=4.0 + 4.0 * panels, height=4.2) as (figure, axes):
        axis = axes[0, 0]
        for way, color in colors.items():
            axis.plot(passes[way], gains[way], "o", ms=7, color=color, mfc="white" if way in DRAWN else color)
            labelled = [
                other for other in ways[: ways.index(way)] if _near((passes[way], gains[way]), (passes[other], gains[other]))
            ]
            offset = (0, -15 if labelled else 7)
            axis.annotate(way, (passes[way], gains[way]), offset, textcoords="offset points", ha="center", color=color)
        powers = range(math.floor(math.log10(min(passes.values()))), math.ceil(math.log10(max(passes.values()))) + 1)
        axis.set(xscale="log", xlabel="passes of one sequence, ranking included (log scale, lower is better)")
        axis.set(ylabel=f"{label}\n(higher is better)", ylim=(min(0.0, *gains.values()) - 0.03, None))
        axis.set_xticks([10**power for power in powers], [f"{10**power:,}" for power in powers])
        axis.margins(y=0.15)
        if panels > 1:
            lines = axes[0, 1]
            for way, values in means.items():
                lines.plot(counts, values, "o-", ms=5, color=colors[way], mfc="white" if way in DRAWN else colors[way])
            ends = _apart([values[-1] for values in means.values()], SPACE * float(np.ptp([*means.values()]) or 1))
            for way, end in zip(means, ends, strict=True):
                lines.annotate(way, (counts[-1], end), (8, 0), textcoords="offset points", va="center", color=colors[way])
            lines.set(xscale="log", xlabel=f"heads; mean of {', '.join(bases) if len(bases) < FEW else f'{len(bases)} bases'}")
            lines.set_xticks(counts, [str(count) for count in counts], minor=False)
            lines.minorticks_off()
            lines.set_xlim(counts[0] * 0.9, counts[-1] * 1.9)
            lines.set_ylim(top=max(ends) * 1.05)
        title = _result(gains, passes, "saves {:.2f} nats" if prose else "gains {:.2f} in accuracy")
        figure.suptitle(title, fontsize=11, fontweight="bold", ha="left", x=0.01)


def _near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether the labels of two points (passes, gain) would touch."""
    return abs(math.log10(one[0] / other[0])) < TOUCHING and abs(one[1] - other[1]) < TOUCHING / 10


def _apart(values: Sequence[float], least: float) -> list[float]:
    """The values, moved apart, so that labels there have at least so much between them."""
    order = np.argsort(values)
    moved = np.array(values, dtype=float)
    for before, number in pairwise(order):
        moved[number] = max(moved[number], moved[before] + least)
    return moved.tolist()


def _result(gains: Mapping[str, float], passes: Mapping[str, float], words: str) -> str:
    """The title: of the ways that gain nearly as much as the best one, the cheapest, compared with the best. words: what a
    gain is."""
    best = max(gains, key=lambda way: gains[way])
    near = [way for way in gains if gains[way] >= NEARLY * gains[best]]
    cheap = min(near, key=lambda way: (passes[way], -gains[way]))
    said = f"{cheap[0].upper()}{cheap[1:]} {words.format(gains[cheap])}"
    if cheap == best:
        return f"{said}, the most of {len(gains)} ways of choosing heads"
    return f"{said}; the best way, {best}, {gains[best]:.2f}\nwith {passes[best] / passes[cheap]:.0f} times as many passes"


STUDY = Ways
