"""Seeds: the main job repeated with other seeds and other ways of tuning, which a claim that surgery helps has to survive.

For every seed the heads are ranked, the model is tuned and both are measured on examples of that seed's own, and so is the
model with the grafts before any tuning. The controls are tuned on the same data and for as many steps: the base with its own
mixers of the same layers, and the base with the same grafts at as many heads at random of the other layers, where it has so
many.
"""

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

from pydantic import Field
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.evaluation.bench import measure
from surgery.evaluation.results import ModelReport, value
from surgery.figures import plotting
from surgery.jobs.locating_stage import located
from surgery.jobs.planning_stage import KEPT, planned
from surgery.jobs.tuning_stage import SECONDS, tuned
from surgery.locating.planning import random_plan
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, changed
from surgery.records.record import write_text
from surgery.runtime.processes import on_main
from surgery.splicing.splice import adopt, splice
from surgery.statistics import Estimate, Proportion
from surgery.studies.figures import draw_seeds
from surgery.studies.study import KNOWLEDGE, TEXT, Findings, Measurements, Row, Study, Subjects, figures_of
from surgery.tuning.trainable import with_own_mixers

LABELS = {KNOWLEDGE: "change of accuracy\n(higher is better)", TEXT: "change of loss, nats per token\n(lower is better)"}
BASE, UNTRAINED, CONTROL, ELSEWHERE = "base", "untrained", "no graft", "random heads"
SEED = ", seed "  # between a model and its seed, in the name of a row


class Seeds(Study):
    """seeds: how many, beginning with the recipe's. ways: name -> the settings of the recipe's `tune` that it changes. The
    recipe's `bench` says what is measured. The controls are tuned in the first way."""

    title: ClassVar[str] = "Tuned on every seed anew"

    seeds: int = Field(default=5, ge=1)
    ways: dict[Annotated[str, Field(pattern=r"^\w[\w ,.-]*$")], dict[str, Any]] = Field(default={"tuned": {}}, min_length=1)

    def check(self, recipe: Recipe) -> None:
        self._recipes(recipe, recipe.seed)
        if reserved := {BASE, UNTRAINED, CONTROL, ELSEWHERE} & {*self.ways}:
            raise UserError(f"study.ways: '{reserved.pop()}' is the name of what the ways are compared with; choose another")
        if "quick" not in recipe.bench.suites:
            raise UserError("the study 'seeds' needs the suite quick: bench.suites: [quick]")

    def _recipes(self, recipe: Recipe, seed: int) -> dict[str, Recipe]:
        return {way: changed(recipe, seed=seed, tune=tune) for way, tune in self.ways.items()}

    def measure(self, subjects: Subjects) -> Measurements:
        rows: list[Row] = []
        seconds: dict[str, list[float]] = {}
        sites: dict[str, tuple[str, ...]] = {}
        for seed in range(subjects.recipe.seed, subjects.recipe.seed + self.seeds):
            recipes = self._recipes(subjects.recipe, seed)
            chosen, reports, durations = _run_seed(subjects, recipes, subjects.out / f"seed-{seed}")
            sites[str(seed)] = tuple(map(str, chosen.sites))
            rows += [Row(what=f"{name}{SEED}{seed}", figures=figures_of(report)) for name, report in reports.items()]
            for way, duration in durations.items():
                seconds.setdefault(way, []).append(duration)
        return Measurements(
            about={"sites": sites, "seconds": seconds},
            summary="\n".join(self._summarise(name, rows, seconds) for name in (UNTRAINED, *seconds)),
            rows=tuple(rows),
        )

    def _summarise(self, model: str, rows: list[Row], seconds: Mapping[str, list[float]]) -> str:
        """The worst result of all seeds, and the smallest lead over what it is compared with, of the same seed: what is not
        tuned with the base, what is with the control that has no graft."""
        against = None if model in (CONTROL, ELSEWHERE) else BASE if model == UNTRAINED else CONTROL
        results, others = _of_model(rows, model), _of_model(rows, against or CONTROL)
        retrieval = []
        for name in (name for name in results[0] if name.startswith("kv.")):
            figures = [value(result[name]) for result in results]
            if against is None:  # of a control, the best tells most
                retrieval.append(f"KV {name[3:]} {min(figures):.3f} to {max(figures):.3f}")
                continue
            lead = min(figure - value(other[name]) for figure, other in zip(figures, others, strict=True))
            retrieval.append(f"KV {name[3:]} at least {min(figures):.3f} ({lead:+.3f} to {against})")
        knowledge, loss = min(value(r[KNOWLEDGE]) for r in results), max(value(r[TEXT]) for r in results)
        cost = f"knowledge {knowledge:+.3f} and loss on text {loss:+.4f} nats at worst"
        took = f"; {median(seconds[model]):.0f} s of tuning" if model in seconds else ""
        return f"{model}: {', '.join(retrieval)}; {cost}{took}."

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        columns = [name for name in findings.rows[0].figures if name.startswith("kv.")][-2:]
        labels = dict.fromkeys(columns, plotting.ACCURACY) | LABELS
        models = dict.fromkeys(row.what.rpartition(SEED)[0] for row in findings.rows)
        of = {model: _of_model(findings.rows, model) for model in models}
        first, largest = next(iter(self.ways)), columns[-1]
        least, most = min(value(each[largest]) for each in of[first]), max(value(each[largest]) for each in of[CONTROL])
        title = f"{largest[3:]} pairs, {len(of[first])} seeds: {first} at least {least:.2f}, {CONTROL} at most {most:.2f}"
        known = {BASE: "base", UNTRAINED: "spliced", first: "tuned", CONTROL: "control_tuned", ELSEWHERE: "control_random_site"}
        colors = {model: plotting.COLORS[name] for model, name in known.items()}
        draw_seeds(of, labels, title, path, control=CONTROL, colors=colors)


def _run_seed(
    subjects: Subjects, recipes: Mapping[str, Recipe], out: Path
) -> tuple[Plan, dict[str, ModelReport], dict[str, float]]:
    """The plan, the report of every model, and the seconds that its tuning took. Kept in `out`."""
    base, recipe = subjects.checkpoint, next(iter(recipes.values()))
    ranking = located(recipe, base, out, resume=subjects.resume, figures=False)
    chosen = planned(recipe, base, ranking, out / KEPT)
    models: dict[str, PreTrainedModel] = {BASE: base.model, UNTRAINED: splice(base.model, chosen)}
    plans: dict[str, Plan | None] = {**dict.fromkeys(recipes, chosen), CONTROL: None}
    if (elsewhere := random_plan(ranking, chosen, recipe.seed)) is not None:
        plans[ELSEWHERE] = elsewhere
    seconds: dict[str, float] = {}
    for name, grafted in plans.items():
        way = recipes.get(name, recipe)
        layers = None if grafted is not None else [site.layer for site in chosen.sites]
        model = with_own_mixers(base, layers) if layers is not None else splice(base.model, grafted or chosen)
        folder, start = out / "tuning" / name, time.monotonic()
        # An interrupted tuning starts again, or only a part of it would be timed.
        resume = subjects.resume and on_main((folder / SECONDS).exists)
        tuned(
            model, base, way, folder, plan=grafted, layers=layers, teacher=adopt(base.model),
            resume=resume, description=f"seed {recipe.seed}, {name}",
        )  # fmt: skip
        models[name] = model
        seconds[name] = on_main(partial(_recorded, folder / SECONDS, round(time.monotonic() - start, 1)))
    reports = measure(
        models, base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=out / "cells",
    )  # fmt: skip
    return chosen, reports, seconds


def _recorded(path: Path, seconds: float) -> float:
    """How long a tuning took: by its file, if it was finished before; else this long, which is written there."""
    if path.exists():
        return json.loads(path.read_text())
    write_text(path, json.dumps(seconds))
    return seconds


def _of_model(rows: Sequence[Row], name: str) -> list[dict[str, Proportion | Estimate]]:
    """The figures of a model, seed by seed."""
    return [row.figures for row in rows if row.what.rpartition(SEED)[0] == name]


STUDY = Seeds
