"""What a dual graft gains before any training, and which scale of its scores that takes.

The heads of the recipe's plan are spliced, with the sign that locate chose, at one scale after the other. The controls are as
many heads at random from the other layers, each with the start that locate found best for it.
"""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from surgery.errors import UserError
from surgery.jobs.planning_stage import KEPT, planned
from surgery.locating.planning import random_plan
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import answer
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.splicing.splice import adopt, install
from surgery.statistics import Proportion, proportion
from surgery.studies.figures import AT_RANDOM, draw_curves
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects


class UntrainedGain(Study):
    """tau: the scales. pairs: the dictionary sizes. controls: how many draws of random heads. The recipe's plan says which
    heads, and its bench.limit how many examples."""

    title: ClassVar[str] = "Dual grafts without training"

    tau: tuple[float, ...] = (0.0625, 0.25, 0.5, 1.0, 2.0, 4.0)
    pairs: tuple[int, ...] = (8, 16, 32, 64)
    controls: int = Field(default=2, ge=0)

    def check(self, recipe: Recipe) -> None:
        if not self.tau or not self.pairs:
            raise UserError("the study 'untrained_gain' needs at least one scale (tau) and one size (pairs)")
        for pairs in self.pairs:
            KVRetrieval(pairs)

    def measure(self, subjects: Subjects) -> Measurements:
        recipe, base = subjects.recipe, subjects.checkpoint
        ranking = subjects.ranking
        chosen = planned(recipe, base, ranking, subjects.out / KEPT)
        questions = {size: KVRetrieval(size).questions(recipe.bench.limit, recipe.seed) for size in self.pairs}

        def accuracy(spliced: Plan | None) -> dict[str, Proportion]:
            model = adopt(base.model) if spliced is None else install(base.model, spliced)
            correct = {size: answer(model.eval(), base.tokenizer, asked).correct for size, asked in questions.items()}
            return {str(size): proportion(values) for size, values in correct.items()}

        names = ", ".join(map(str, chosen.sites))
        measured = {"base": accuracy(None)}
        measured |= {f"{names}, tau {tau:g}": accuracy(at_scale(chosen, tau)) for tau in self.tau}
        drawn = [random_plan(ranking, chosen, recipe.seed + number) for number in range(self.controls)]
        for number, control in enumerate(filter(None, drawn), 1):
            measured[f"{', '.join(map(str, control.sites))} {AT_RANDOM} ({number})"] = accuracy(control)
        largest = str(max(self.pairs))
        told = "; ".join(f"{what} {figures[largest].accuracy:.3f}" for what, figures in measured.items())
        return Measurements(
            about={
                "sites": list(map(str, chosen.sites)),
                "starts": {head: start.model_dump() for head, start in chosen.starts.items()},
                "controls": [list(map(str, control.sites)) for control in filter(None, drawn)],
            },
            summary=f"At {largest} pairs, without training: {told}.",
            rows=tuple(Row(what=what, figures=dict(figures)) for what, figures in measured.items()),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        draw_curves(findings, self.title, path)


def at_scale(chosen: Plan, tau: float) -> Plan:
    """The same heads and signs, all at one scale."""
    heads = [head for site in chosen.sites for head in site.each()]
    starts = {str(head): chosen.start(head.layer, head.heads[0]).model_copy(update={"tau": tau}) for head in heads}
    return chosen.model_copy(update={"starts": starts})


STUDY = UntrainedGain
