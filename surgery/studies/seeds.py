"""The main job over seeds, and by several ways of tuning: what a claim that surgery helps has to survive.

Every seed ranks the heads, tunes and measures on examples of its own, beside the control: the base's own mixers of the same
layers, tuned on the same data for the same steps.
"""

import copy
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

import matplotlib.pyplot as plt
from pydantic import Field
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.evaluation.bench import bench
from surgery.evaluation.report import ModelReport, value
from surgery.jobs.locating_stage import located
from surgery.jobs.tuning_stage import SECONDS, tuned
from surgery.locating.planning import plan
from surgery.probes.knowledge import part_for_bench
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, changed
from surgery.records.record import write_text
from surgery.runtime import plotting as plots
from surgery.runtime.processes import on_main
from surgery.splicing.splice import adopt, splice
from surgery.statistics import Estimate, Proportion
from surgery.studies.figures import LINES
from surgery.studies.study import Findings, Found, Row, Study, Subjects

KNOWLEDGE, TEXT = "knowledge, change", "loss on text, change in nats"
CHANGES = {KNOWLEDGE: "knowledge", TEXT: "perplexity"}
BASE, CONTROL = "base", "no graft"
SEED = ", seed "  # between a model and its seed, in the name of a row


class Seeds(Study):
    """seeds: how many, from the recipe's on. ways: what each changes in the recipe's `tune`. The recipe's `bench` says what is
    measured. The control is tuned by the first way."""

    title: ClassVar[str] = "Tuned on every seed anew"

    seeds: int = Field(default=5, ge=1)
    ways: dict[Annotated[str, Field(pattern=r"^\w[\w ,.-]*$")], dict[str, Any]] = Field(default={"tuned": {}}, min_length=1)

    def check(self, recipe: Recipe) -> None:
        self._recipes(recipe, recipe.seed)
        if taken := {BASE, CONTROL} & {*self.ways}:
            raise UserError(f"study.ways: '{taken.pop()}' is the name of what the ways are compared with; choose another")
        if "quick" not in recipe.bench.suites:
            raise UserError("the study 'seeds' needs the suite quick: bench.suites: [quick]")

    def _recipes(self, recipe: Recipe, seed: int) -> dict[str, Recipe]:
        return {way: changed(recipe, seed=seed, tune=tune) for way, tune in self.ways.items()}

    def measure(self, subjects: Subjects) -> Found:
        rows: list[Row] = []
        seconds: dict[str, list[float]] = {}
        sites: dict[str, tuple[str, ...]] = {}
        for seed in range(subjects.recipe.seed, subjects.recipe.seed + self.seeds):
            recipes = self._recipes(subjects.recipe, seed)
            chosen, measured, took = _seed(subjects, recipes, subjects.out / f"seed-{seed}")
            sites[str(seed)] = tuple(map(str, chosen.sites))
            rows += [Row(what=f"{name}{SEED}{seed}", figures=_figures(found)) for name, found in measured.items()]
            for way, duration in took.items():
                seconds.setdefault(way, []).append(duration)
        return Found(
            about={"sites": sites, "seconds": seconds},
            summary="\n".join(self._said(way, rows, seconds) for way in (*self.ways, CONTROL)),
            rows=tuple(rows),
        )

    def _said(self, way: str, rows: list[Row], seconds: Mapping[str, list[float]]) -> str:
        """The worst of all seeds; against the control, seed by seed."""
        found, control = _of(rows, way), _of(rows, CONTROL)
        retrieval = []
        for name in (name for name in found[0] if name.startswith("kv.")):
            least = f"KV {name[3:]} at least {min(value(f[name]) for f in found):.3f}"
            above = min(value(f[name]) - value(c[name]) for f, c in zip(found, control, strict=True))
            retrieval.append(least if way == CONTROL else f"{least} ({above:+.3f} to {CONTROL})")
        knowledge, loss = min(value(f[KNOWLEDGE]) for f in found), max(value(f[TEXT]) for f in found)
        cost = f"knowledge {knowledge:+.3f} and loss on text {loss:+.4f} nats at worst"
        return f"{way}: {', '.join(retrieval)}; {cost}; {median(seconds[way]):.0f} s of tuning."

    def draw(self, findings: Findings, path: Path, subjects: Subjects) -> None:
        columns = [name for name in findings.rows[0].figures if name.startswith("kv.")]
        columns = [*columns[-2:], KNOWLEDGE, TEXT]
        every = list(dict.fromkeys(row.what.rpartition(SEED)[0] for row in findings.rows))
        with plt.rc_context(plots.STYLE):
            figure, axes = plt.subplots(1, len(columns), figsize=(3.1 * len(columns), 3.4), squeeze=False)
            for axis, column in zip(axes[0], columns, strict=True):
                names = [name for name in every if column in _of(findings.rows, name)[0]]
                for place, name in enumerate(names):
                    _draw_points(axis, place, LINES[every.index(name) % len(LINES)], _of(findings.rows, name), column)
                axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
                axis.set(title=column.replace("kv.", "KV "), xlim=(-0.5, len(names) - 0.5))
                if column.startswith("kv."):
                    axis.set_ylim(0, 1.02)
                else:
                    axis.axhline(0, color="#bbbbbb", lw=1)
            figure.suptitle(self.title, fontsize=10)
            figure.tight_layout()
            plots.save(figure, path)


def _seed(
    subjects: Subjects, recipes: Mapping[str, Recipe], out: Path
) -> tuple[Plan, dict[str, ModelReport], dict[str, float]]:
    """The plan, what was measured of every model, and the seconds that each was tuned for; kept in `out`."""
    base, recipe = subjects.checkpoint, next(iter(recipes.values()))
    ranking = located(recipe, base, out, resume=subjects.resume, figures=False)
    chosen = plan(ranking, **recipe.plan.model_dump(), seed=recipe.seed)
    models: dict[str, PreTrainedModel] = {BASE: base.model}
    seconds: dict[str, float] = {}
    for name, own in {**recipes, CONTROL: recipe}.items():
        layers = [site.layer for site in chosen.sites] if name == CONTROL else None
        model = splice(base.model, chosen) if layers is None else copy.deepcopy(adopt(base.model))
        folder, start = out / "tuning" / name, time.monotonic()
        # One that was interrupted begins anew, or its time would be that of a part.
        resume = subjects.resume and on_main((folder / SECONDS).exists)
        tuned(
            model, base, own, folder, plan=chosen if layers is None else None, layers=layers, teacher=adopt(base.model),
            resume=resume, description=f"seed {recipe.seed}, {name}",
        )  # fmt: skip
        models[name] = model
        seconds[name] = on_main(partial(_kept_seconds, folder / SECONDS, round(time.monotonic() - start, 1)))
    measured = bench(
        models, base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=out / "cells",
        part=part_for_bench(own.tune.early_stopping for own in recipes.values()),
    )  # fmt: skip
    return chosen, measured, seconds


def _kept_seconds(path: Path, seconds: float) -> float:
    """How long a tuning took, by its file if it was finished before."""
    if path.exists():
        return json.loads(path.read_text())
    write_text(path, json.dumps(seconds))
    return seconds


def _figures(found: ModelReport) -> dict[str, Proportion | Estimate]:
    """change is empty for the base."""
    changes = {column: found.change[name] for column, name in CHANGES.items() if name in found.change}
    return {f"kv.{size}": accuracy for size, accuracy in found.kv.items()} | changes


def _of(rows: Sequence[Row], name: str) -> list[dict[str, Proportion | Estimate]]:
    """What was measured of a model, seed by seed."""
    return [row.figures for row in rows if row.what.rpartition(SEED)[0] == name]


def _draw_points(axis: Any, place: int, color: str, found: list[dict[str, Proportion | Estimate]], column: str) -> None:
    """A point a seed, side by side, with its 95% interval."""
    for i, one in enumerate(figures[column] for figures in found):
        at, height = place + (i - (len(found) - 1) / 2) * 0.6 / len(found), value(one)
        errors = ([height - one.ci95[0]], [one.ci95[1] - height])
        axis.errorbar(at, height, errors, fmt="o", ms=3.5, lw=0.9, color=color)


STUDY = Seeds
