"""Windows against the cache: what attention heads that forget cost, in three orders of the heads.

Groups of attention heads get a window one after another: those first whose window alone costs least (as `surgery plan` does),
those first whose ablation costs least, and at random. Where the recipe's plan has grafts, these are measured alone and beside
the windows. Every plan is asked the same questions and reads the same text, so that all differences are paired, and its cache
is counted from tensors.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field
from transformers import PreTrainedModel

from surgery.choosing.bounded import Measuring, PlanMeasurement
from surgery.choosing.windows import least_needed, windowed
from surgery.errors import UserError
from surgery.evaluation.results import value
from surgery.evaluation.task import bench_seed
from surgery.figures import plotting
from surgery.jobs.locating_stage import located
from surgery.locating.planning import plan
from surgery.locating.ranking import Ranking
from surgery.models.cache import cache_after, cache_parts, prefilled
from surgery.probes import make
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, WindowOptions, changed
from surgery.records.sections.section import Count
from surgery.records.site import Site
from surgery.splicing.splice import install
from surgery.statistics import Estimate, Proportion, difference, proportion, written
from surgery.studies.figures import AT_RANDOM, whiskers
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects
from surgery.tuning.batches import held_out_windows

SEED = 20_011  # of the windows of text, added to the recipe's: locating has others
FEW = 1000  # choices of groups that are listed to draw from
BASE, GRAFTS, WINDOWS, BOTH = "base", "grafts", "windows", "grafts and windows"
ABLATION, RANDOM = "windows by ablation", f"windows {AT_RANDOM}"
RETRIEVAL, CHANGE, TEXT = "retrieval", "retrieval, change", "loss on text, change in nats"
POINT, NATS = 0.01, 0.01  # what may be lost of retrieval and of text
COLORS = {
    BASE: "#24292F", GRAFTS: "#E69F00", WINDOWS: "#0072B2", BOTH: "#009E73", ABLATION: "#CC79A7", RANDOM: "#D55E00",
}  # fmt: skip


class Case(NamedTuple):
    """What a row is of. groups: how many have a window. steps: of tuning adapters."""

    kind: str
    plan: Plan | None
    groups: int = 0
    draw: int = 0
    steps: int = 0

    def name(self, whole: int) -> str:
        """whole: how many groups the model has."""
        parts = [self.kind, *([f"{self.groups} of {whole} groups"] if self.groups else [])]
        parts += [f"draw {self.draw}"] if self.draw else []
        return ", ".join([*parts, *(["tuned"] if self.steps else [])])


class WindowsAgainstCache(Study):
    """draws: of random groups, for each number of them. tokens: after which the cache is counted. healed: numbers of groups
    whose windows are also tuned, for tune.steps steps with the adapters of tune.lora. The recipe's plan.window says how long
    windows are; with plan.kind head, its grafts are measured, too. locate.examples questions of locate.probe order the groups,
    bench.limit others are asked, and bench.windows windows of text are read."""

    title: ClassVar[str] = "Retrieval against the bytes of the cache"

    draws: Count = 5
    tokens: Count = 32_768
    healed: tuple[Count, ...] = Field(default=())

    def check(self, recipe: Recipe) -> None:
        if recipe.plan.window is None or recipe.plan.kind == "layer":
            raise UserError("the study 'windows' needs plan.window, and plan.kind window or head")
        if self.healed and (recipe.tune.lora is None or recipe.tune.steps == "auto"):
            raise UserError("study.healed: adapters are tuned: set tune.lora, and tune.steps to a number")

    def measure(self, subjects: Subjects) -> Measurements:
        subject, recipe, out, options = subjects.subject, subjects.recipe, subjects.out, subjects.recipe.plan.window
        assert options is not None
        exact = changed(recipe, locate={"exact": True})
        ranking = located(exact, subjects.checkpoint, out, resume=subjects.resume, figures=False, subject=subject)
        grafts = plan(ranking, **recipe.plan.given(), seed=recipe.seed) if recipe.plan.kind == "head" else None
        probe: Any = make(recipe.locate.probe, **recipe.locate.options)
        text = held_out_windows(subject.tokenizer, recipe.data, recipe.tune, recipe.bench.windows, recipe.seed + SEED)
        measuring, ordering = (
            Measuring(
                subject, questions, text, recipe.bench.batch_size, out / "measured", tuning=recipe.tune, data=recipe.data,
                seed=recipe.seed,
            )
            for questions in (
                probe.questions(recipe.bench.limit, bench_seed(recipe.seed)),
                probe.questions(recipe.locate.examples, recipe.seed),
            )
        )  # fmt: skip
        order = least_needed(ordering, options)
        beside = least_needed(ordering, options, grafts) if grafts is not None else []
        cases = [Case(BASE, None), *([Case(GRAFTS, grafts)] if grafts is not None else [])]
        cases += self._windowed(order, _by_ablation(order, ranking), options, recipe.seed)
        cases += [Case(BOTH, windowed(beside[: i + 1], options, grafts), i + 1) for i in range(len(beside))]
        healed = [case for case in cases if case.groups in self.healed and case.kind in (WINDOWS, RANDOM)]
        measured = measuring.measure([case.plan for case in cases], "windows")
        if healed:
            measured += measuring.measure([case.plan for case in healed], "windows, tuned", int(recipe.tune.steps))
        cases += [case._replace(steps=int(recipe.tune.steps)) for case in healed]
        names = [case.name(len(order)) for case in cases]
        result = Measurements(
            about={
                "groups": [str(site) for site in order], "grafts": [str(site) for site in grafts.sites] if grafts else [],
                "tokens": self.tokens,
                "plans": {name: self._about(case, subject.model) for name, case in zip(names, cases, strict=True)},
            },
            summary="", rows=tuple(
                Row(what=name, figures=_figures(measured[0], each)) for name, each in zip(names, measured, strict=True)
            ),
        )  # fmt: skip
        return result.model_copy(update={"summary": "\n".join(summarise(result))})

    def _windowed(
        self, order: Sequence[Site], by_ablation: Sequence[Site], options: WindowOptions, seed: int
    ) -> Iterator[Case]:  # fmt: skip
        """Windows alone: by what each costs, by ablation, and other choices at random."""
        for count in range(1, len(order) + 1):
            yield Case(WINDOWS, windowed(order[:count], options), count)
            if count < len(order):
                yield Case(ABLATION, windowed(by_ablation[:count], options), count)
            others = _others(order, count, self.draws, f"{seed} {count}")
            yield from (Case(RANDOM, windowed(other, options), count, draw) for draw, other in enumerate(others, 1))

    def _about(self, case: Case, base: PreTrainedModel) -> dict[str, Any]:
        """Of a row: what it is of, what the whole cache takes, and its keys and values."""
        model = install(base, case.plan).eval() if case.plan is not None else base
        parts = cache_parts(prefilled(model, 64))
        fixed = sum(size for part, size in parts.items() if part not in ("keys", "values"))
        whole, windows = cache_after(model, self.tokens), case.plan and case.plan.windows
        return {
            "kind": case.kind, "groups": case.groups, "steps": case.steps, "cache": whole, "attention": whole - fixed,
            "windows": [str(site) for site in windows.sites] if windows else [],
        }  # fmt: skip

    @staticmethod
    def table(findings: Findings) -> tuple[list[str], list[list[str]]]:
        """A row for each number of windows: the cache, and retrieval in each order; of draws from the least to the largest. The
        last column is what the first order, and those at random, change of the loss on text."""
        plans, orders = findings.about["plans"], [WINDOWS, ABLATION, RANDOM, *([BOTH] if findings.about["grafts"] else [])]
        body = [[f"none ({row.what})", _mib(plans, row), written(value(row.figures[RETRIEVAL]))] for row in findings.rows[:1]]
        body[0] += [""] * len(orders)
        for tuned in (False, True):
            for row in rows_of(findings, WINDOWS, tuned=tuned):
                number = plans[row.what]["groups"]
                each = [rows_of(findings, kind, number, tuned) for kind in orders]
                body.append([
                    f"{number}{', tuned' * tuned}", _mib(plans, row), *(_range(those, RETRIEVAL) for those in each),
                    f"{_range(each[0], TEXT, '+.4f')}; {_range(each[2], TEXT, '+.4f')}".removesuffix("; "),
                ])  # fmt: skip
        return ["windows for", "MiB of cache", *orders, f"{TEXT}: windows; at random"], body

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        """Retrieval against the cache: a line for each order of the groups, a point for each draw."""
        plans = findings.about["plans"]
        with plotting.drawing(path, height=4.6, width=7.4) as (figure, axes):
            axis, labelled = axes[0, 0], set[str]()
            for row in findings.rows:
                about, cell = plans[row.what], row.figures[RETRIEVAL]
                kind, tuned = about["kind"], bool(about["steps"])
                label = f"{kind}, tuned" if tuned else kind
                marker = {"fmt": "s" if tuned else "o", "ms": 8 if kind == ABLATION else 6}
                axis.errorbar(
                    about["cache"] / 2**20, value(cell), whiskers([cell]), **marker, lw=1, color=COLORS[kind],
                    capsize=2, mfc="white" if kind == RANDOM else COLORS[kind], zorder=3 if kind in (WINDOWS, BOTH) else 2,
                    label=None if label in labelled else label,
                )  # fmt: skip
                labelled.add(label)
            for kind, start in ((WINDOWS, BASE), (ABLATION, BASE), (BOTH, GRAFTS)):
                if line := rows_of(findings, kind):
                    line = [*rows_of(findings, start), *line]
                    sizes = [plans[row.what]["cache"] / 2**20 for row in line]
                    axis.plot(sizes, [value(row.figures[RETRIEVAL]) for row in line], lw=1.2, color=COLORS[kind])
            plotting.accuracy_axis(axis, xlabel=plotting.lower(f"MiB of cache after {findings.about['tokens']:,} tokens"))
            axis.set_xlim(left=0)
            axis.set_title(_headline(findings))
            plotting.legend(figure, axis)


def _by_ablation(groups: Sequence[Site], ranking: Ranking) -> list[Site]:
    """The groups, those first whose heads' ablation costs least."""
    losses = ranking.columns.values("ablation_loss")

    def cost(group: Site) -> float:
        return sum(float(losses[place]) for place in ranking.columns.find(group.each()) if place is not None)

    return sorted(groups, key=cost)


def _others(order: Sequence[Site], count: int, draws: int, seed: str) -> list[tuple[Site, ...]]:
    """At most so many other choices of as many groups as lead the order, all different."""
    generator, own = random.Random(seed), {*order[:count]}
    if comb(len(order), count) <= FEW:
        choices = [each for each in combinations(order, count) if {*each} != own]
        return generator.sample(choices, min(draws, len(choices)))
    drawn: dict[frozenset[Site], tuple[Site, ...]] = {}
    while len(drawn) < draws:
        each = tuple(generator.sample(list(order), count))
        if {*each} != own:
            drawn[frozenset(each)] = each
    return [*drawn.values()]


def _figures(before: PlanMeasurement, measured: PlanMeasurement) -> dict[str, Proportion | Estimate]:
    """Paired with what the base does."""
    if measured is before:
        return {RETRIEVAL: proportion(measured.correct)}
    return {
        RETRIEVAL: proportion(measured.correct), CHANGE: difference(before.correct, measured.correct),
        TEXT: difference(before.text, measured.text),
    }  # fmt: skip


def _mib(plans: Mapping[str, Any], row: Row) -> str:
    return f"{plans[row.what]['cache'] / 2**20:.1f}"


def _range(rows: Sequence[Row], column: str, form: str = ".3f") -> str:
    values = sorted(value(row.figures[column]) for row in rows)
    return " to ".join(dict.fromkeys(format(each, form) for each in (values[:1] + values[-1:])))


def kept(row: Row) -> bool:
    """Whether retrieval and text are within a point and a hundredth of a nat of the base's."""
    return value(row.figures[CHANGE]) >= -POINT and value(row.figures[TEXT]) <= NATS


def rows_of(findings: Measurements, kind: str, count: int | None = None, tuned: bool = False) -> list[Row]:
    """The rows of a kind, with so many windows (of any number, unless given)."""
    plans = findings.about["plans"]
    return [
        row for row in findings.rows
        if plans[row.what]["kind"] == kind and count in (None, plans[row.what]["groups"])
        and bool(plans[row.what]["steps"]) == tuned
    ]  # fmt: skip


def half(findings: Measurements) -> int:
    """The fewest windows with which the attention's cache is half of the base's or less, to a hundredth: windows keep a few
    tokens."""
    plans = findings.about["plans"]
    counts = [plans[row.what]["groups"] for row in rows_of(findings, WINDOWS) if _share(plans, row) <= 0.5]
    return min(counts, default=len(findings.about["groups"]))


def _share(plans: Mapping[str, Any], row: Row) -> float:
    """Of the base's keys and values."""
    return round(plans[row.what]["attention"] / plans[BASE]["attention"], 2)


def summarise(findings: Measurements) -> list[str]:
    """What half of the attention's cache costs in each order, as it is and tuned; a sentence each."""
    count, groups, plans = half(findings), len(findings.about["groups"]), findings.about["plans"]
    (row,) = rows_of(findings, WINDOWS, count)
    lines = [
        f"Windows for {count} of {groups} groups of attention heads leave {_share(plans, row):.2f} of the attention's cache "
        f"after {findings.about['tokens']:,} tokens ({plans[BASE]['attention']:,} to {plans[row.what]['attention']:,} bytes): "
        f"{_told([row])}"
    ]
    for kind, what in ((ABLATION, "In the order of ablation"), (RANDOM, "At random"), (BOTH, "Beside grafts")):
        if others := rows_of(findings, kind, count):
            draws = f", {len(others)} draws" if len(others) > 1 else ""
            lines.append(f"{what}, as many groups{draws}: {_told(others)}")
    for row in rows_of(findings, WINDOWS, tuned=True):
        number = plans[row.what]["groups"]
        at_random = rows_of(findings, RANDOM, number, tuned=True)
        lines.append(
            f"Tuned, {number} of {groups} groups: {_told([row])}" + (f" At random: {_told(at_random)}" if at_random else "")
        )
    most = max((plans[row.what]["groups"] for row in rows_of(findings, WINDOWS) if kept(row)), default=0)
    many = f"up to {most} of {groups} groups" if most else "no group"
    lines.append(f"Untrained, windows for {many} keep retrieval within {POINT:g} and text within {NATS:g} nats of the base's.")
    return lines


def _told(rows: Sequence[Row]) -> str:
    """Of one row with its intervals; of several from the least to the largest."""
    if len(rows) == 1:
        change, text = rows[0].figures[CHANGE], rows[0].figures[TEXT]
        low, high = text.ci95
        return f"retrieval {change}, text {value(text):+.4f} nats [{low:+.4f}, {high:+.4f}]."
    changes, texts = ([value(row.figures[column]) for row in rows] for column in (CHANGE, TEXT))
    return (
        f"retrieval {min(changes):+.3f} to {max(changes):+.3f}, text {min(texts):+.4f} to {max(texts):+.4f} nats; "
        f"{sum(map(kept, rows))} of {len(rows)} keep both."
    )


def _headline(findings: Measurements) -> str:
    (row,) = rows_of(findings, WINDOWS, half(findings))
    drawn = rows_of(findings, RANDOM, half(findings))
    at_random = f"; at random {_range(drawn, CHANGE, '+.3f')}" if drawn else ""
    share, change = _share(findings.about["plans"], row), value(row.figures[CHANGE])
    return f"Windows where they cost least: {share:.2f} of the attention's cache,\nretrieval {change:+.3f}{at_random}"


STUDY = WindowsAgainstCache
