"""Two hops: do the few heads that serve one hop serve two?

One hop: what is the value of a key? Two: what is the value of the value of a key (probes/two_hops.py)? The heads that the
recipe plans for its own probe, one hop, are tuned on lessons of both. They are compared with heads located by two hops,
the same heads with as many of other layers, which lead there, and the controls: as many other heads at random, added or alone,
and the base's own mixers tuned without a graft. All learn from the same lessons for as many steps.

Then each graft of the tuned hybrids is ablated in turn: one that both need costs both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.evaluation.markdown import shortened
from surgery.evaluation.results import value
from surgery.evaluation.task import bench_seed
from surgery.figures import plotting
from surgery.jobs.locating_stage import located
from surgery.jobs.planning_stage import KEPT, planned
from surgery.jobs.tuning_stage import tuned
from surgery.locating.planning import plan, random_plan
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.locating.substitution import ablate_heads
from surgery.probes import make
from surgery.probes.scoring import answer
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, changed
from surgery.records.sections.section import Count
from surgery.records.site import Site
from surgery.runtime.progress import Track
from surgery.splicing.splice import adopt, splice
from surgery.statistics import Proportion, proportion
from surgery.studies.figures import whiskers
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects
from surgery.tuning.trainable import with_own_mixers

BASE, NO_GRAFT = "base", "no graft, tuned"
ONE_HOP, TWO_HOPS, OTHERS = "heads of one hop, tuned", "heads of two hops, tuned", "heads of one hop and of other layers, tuned"
AT_RANDOM, WITH_RANDOM = "random heads, tuned", "heads of one hop and random heads, tuned"
ABLATED = ": without "  # between a model and a graft, in the name of a row
FEW = 8  # heads of a plan, up to which each is ablated by itself; of more, those of a layer together
NAMES = {"one": "one hop", "two": "two hops"}


class Hops(Study):
    """one, two: how many pairs are asked of one hop and of two. The recipe's `locate` and `plan` find the heads of one hop, its
    `tune.lessons` teach both, and bench.limit says how many questions of each size are asked."""

    title: ClassVar[str] = "Two hops, by the heads of one"

    one: tuple[Count, ...] = Field(default=(32,), min_length=1)
    two: tuple[Count, ...] = Field(default=(2, 4, 8), min_length=1)

    def check(self, recipe: Recipe) -> None:
        if recipe.plan.kind == "layer":
            raise UserError("the study 'hops' grafts heads: leave out plan.kind")
        if "two_hops" not in {lesson.probe for lesson in recipe.tune.lessons}:
            raise UserError("the study 'hops' needs lessons of two hops: a lesson of the probe two_hops in tune.lessons")
        self.questions(recipe.bench.limit, 0)

    def questions(self, n: int, seed: int) -> dict[str, Any]:
        """Column -> questions."""
        sizes = {"one": ("kv", self.one), "two": ("two_hops", self.two)}
        return {
            f"{NAMES[hops]}, {pairs} pairs": make(probe, pairs=pairs).questions(n, seed)  # type: ignore[union-attr]
            for hops, (probe, each) in sizes.items() for pairs in each
        }  # fmt: skip

    def measure(self, subjects: Subjects) -> Measurements:
        recipe, base, out = subjects.recipe, subjects.checkpoint, subjects.out
        asked = self.questions(recipe.bench.limit, bench_seed(recipe.seed))
        ranking = located(recipe, base, out / "one", resume=subjects.resume, figures=False)
        chosen = planned(recipe, base, ranking, out / KEPT)
        by_two = changed(recipe, locate={"probe": "two_hops", "options": {"pairs": min(self.two)}})
        ranking_of_two = located(by_two, base, out / "two", resume=subjects.resume, figures=False)
        plans = _plans(recipe, chosen, ranking, ranking_of_two)
        layers = [site.layer for site in chosen.sites]

        def figures(model: PreTrainedModel) -> dict[str, Proportion]:
            return {
                name: proportion(answer(model, base.tokenizer, each, recipe.bench.batch_size).correct)
                for name, each in asked.items()
            }

        rows = [Row(what=BASE, figures=dict(figures(adopt(base.model).eval())))]
        ablated: list[Row] = []
        for number, (name, grafted) in enumerate({NO_GRAFT: None, **plans}.items()):
            model = with_own_mixers(base, layers) if grafted is None else splice(base.model, grafted)
            tuned(
                model, base, recipe, out / "tuning" / str(number), plan=grafted, layers=None if grafted else layers,
                teacher=adopt(base.model), resume=subjects.resume, description=name,
            )  # fmt: skip
            model.eval()
            rows.append(Row(what=name, figures=dict(figures(model))))
            if grafted is None or name not in (ONE_HOP, OTHERS):
                continue
            of_hybrid = Subject.of(model, base.tokenizer)
            for heads in Track(_groups(grafted.sites), "ablating"):
                with ablate_heads(of_hybrid.anatomy, heads):
                    ablated.append(Row(what=f"{name}{ABLATED}{shortened(heads)}", figures=dict(figures(model))))
        about = {
            "sites": {name: shortened(grafted.sites) for name, grafted in plans.items()},
            "located": {"one": str(ranking.base_accuracy), "two": str(ranking_of_two.base_accuracy)},
            "chance": {name: float(each[0].chance) for name, each in asked.items()},
        }
        every = (*rows, *ablated)
        return Measurements(about=about, summary=_summary(every, about), rows=every)

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        """Both kinds of question, a bar a model; below, what is left without each graft."""
        columns, chance = list(findings.rows[0].figures), findings.about["chance"]
        shown = [next(name for name in columns if name.startswith(NAMES["one"])), columns[-1]]
        names = [row.what for row in findings.rows]
        with plotting.drawing(path, 1, 2, width=9.5, height=1.6 + 0.32 * len(names), sharey=True) as (figure, axes):
            for axis, column in zip(axes.flat, shown, strict=True):
                results = [row.figures[column] for row in findings.rows]
                colors = [_color(name) for name in names]
                axis.barh(range(len(names)), [value(each) for each in results], 0.62, xerr=whiskers(results), color=colors,
                          error_kw={"lw": 1, "ecolor": "#24292F", "capsize": 2})  # fmt: skip
                axis.axvline(chance[column], color=plotting.CHANCE, lw=1.6, ls=(0, (1, 1.5)))
                axis.set(xlabel=plotting.ACCURACY, xlim=(0, 1.02), title=column)
            axes.flat[0].set_yticks(range(len(names)), names)
            axes.flat[0].invert_yaxis()
            tuned = [row for row in findings.rows if row.what != BASE and ABLATED not in row.what]
            above = sum(row.figures[shown[1]].ci95[0] > chance[shown[1]] for row in tuned)
            title = f"{shown[1]}: {above or 'no'} tuned model{'s' * (above != 1)} above chance (dotted)"
            figure.suptitle(title.capitalize(), fontsize=11, fontweight="bold", ha="left", x=0.01)


def _plans(recipe: Recipe, chosen: Plan, ranking: Ranking, ranking_of_two: Ranking) -> dict[str, Plan]:
    """By name, what is grafted. Heads of two hops that are those of one are not tuned twice."""
    heads = [head for site in chosen.sites for head in site.each()]
    layers, options = {head.layer for head in heads}, recipe.plan

    def at(of: Ranking, sites: Sequence[Site]) -> Plan:
        return plan(of, sites=tuple(sites), width=options.width, shared=options.shared, blend=options.blend, seed=recipe.seed)

    plans = {ONE_HOP: chosen}
    leading = [score.site for score in ranking_of_two.columns.sorted()[: len(heads)]]
    if {*leading} != {*heads}:
        plans[TWO_HOPS] = at(ranking_of_two, leading)
    others = [score.site for score in ranking.columns.sorted() if score.site.layer not in layers][: len(heads)]
    if len(others) == len(heads):
        plans[OTHERS] = at(ranking, [*heads, *others])
    if (random := random_plan(ranking, chosen, recipe.seed)) is not None:
        plans[AT_RANDOM] = random
        plans[WITH_RANDOM] = at(ranking, [*heads, *(head for site in random.sites for head in site.each())])
    return plans


def _groups(sites: Sequence[Site]) -> list[list[Site]]:
    """What is ablated together."""
    heads = [head for site in sites for head in site.each()]
    return [[head] for head in heads] if len(heads) <= FEW else [[*site.each()] for site in sites]


def _color(name: str) -> str:
    if ABLATED in name:
        return "#56B4E9"
    return "#24292F" if name == BASE else plotting.OTHERS if name in (NO_GRAFT, AT_RANDOM, WITH_RANDOM) else "#009E73"


def _summary(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """A line for each model."""
    lines = []
    for row in rows:
        told = ", ".join(f"{name} {value(each):.3f}" for name, each in row.figures.items())
        sites = about["sites"].get(row.what)
        lines.append(f"{row.what}{f' ({sites})' if sites else ''}: {told}.")
    return "\n".join(lines)


STUDY = Hops
