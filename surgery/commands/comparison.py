"""Benches models against a base, as `surgery bench` does."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from surgery.commands.compared import open_compared
from surgery.commands.controls import Control, controls_of, names_of, seconds_of, trained
from surgery.costs.announced import announce
from surgery.costs.estimate import BenchCosts
from surgery.costs.record import CostEstimate
from surgery.errors import UserError
from surgery.evaluation.bench import measure
from surgery.evaluation.entries import Entry, ModelPool
from surgery.evaluation.report import Report
from surgery.evaluation.suites import try_out
from surgery.evaluation.views import MeasuredModels
from surgery.jobs.output_folder import begin, check_folder, withdrawn_if_refused
from surgery.jobs.preparing import check, name_texts
from surgery.jobs.report_folder import REPORT, write_report
from surgery.kernels.dispatch import use
from surgery.loading.digests import Conditions, tokenizer_digest
from surgery.loading.opened import Checkpoint
from surgery.models import pace
from surgery.records.names import display_name, strip_paths
from surgery.records.plan import PLAN, Plan
from surgery.records.recipe import Recipe
from surgery.records.record import provenance
from surgery.runtime import memory
from surgery.runtime.processes import on_main, several_processes
from surgery.runtime.progress import busy, say


@withdrawn_if_refused
def compare(
    recipe: Recipe,
    others: list[str],
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Report:
    """Bench the recipe's model against `others` on the same examples. Writes report.json, report.md, report.html and figures
    into `out`. With bench.controls, the recipe's model is also tuned as each of the others was, without a graft, and measured.

    resume: go on with an earlier comparison there; a cell of the same model and questions is not measured again. overwrite:
    remove it first. Raises UserError, and writes nothing, where one is there and neither is given.
    """
    on_main(partial(check_folder, out, "bench", resume=resume, overwrite=overwrite))
    recipe, base, entries, missing = _opened(recipe, others, trust_remote_code)
    begin(out, "bench", recipe, resume=resume, overwrite=overwrite)
    name_texts(recipe, base.tokenizer, tunes=False)
    settings = strip_paths(recipe.model_dump(mode="json"))
    with use(**recipe.kernels):
        entries |= trained(missing, base, out, resume=resume)
        with busy("reading the weights"):
            models, words = ModelPool(entries), tokenizer_digest(base.tokenizer)
            now = {name: models.measured_under(name, base.tokenizer, words) for name in entries}
            for name, entry in entries.items():
                entry.measured_under = now[name]
        if resume and (earlier := on_main(partial(_finished, out, settings, now))) is not None:
            say(f"nothing has changed, and everything is finished: this is the result in {out}")
            return earlier
        if not resume:
            announce(lambda: BenchCosts(recipe, [*models.held.values()], base.tokenizer))
        memory.trim()  # what the controls have freed is no part of it
        with memory.measured() as peak:
            measured = measure(entries, base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=out / "cells")
    origin = provenance(base.name, base.fingerprint, recipe.seed, settings)
    report = Report(
        provenance=origin, plan=None, models=measured, timings={}, memory={"bench": peak.device or peak.total}, training={},
        settings=settings["bench"],
    )  # fmt: skip
    with busy("drawing the report"):
        on_main(partial(write_report, MeasuredModels(report, base, entries, recipe), out))
    return report


def estimate_comparison(
    recipe: Recipe, others: list[str], out: Path, *, trust_remote_code: bool = False
) -> CostEstimate:  # fmt: skip
    """What compare(recipe, others, out) will cost: the controls that it tunes, and bench. Nothing is written. Raises UserError
    for whatever compare would refuse before its work begins."""
    if several_processes():
        raise UserError("an estimate is made by one process; start it without a launcher")
    begun, waiting = time.perf_counter(), pace.load()
    recipe, base, entries, missing = _opened(recipe, others, trust_remote_code)
    with use(**recipe.kernels):
        costs = BenchCosts(recipe, [*ModelPool(entries).held.values()], base.tokenizer, says=True)
        stages = [
            costs.tuning(name, control.recipe.tune.most_steps, seconds_of(control, base))
            for name, control in names_of(missing).items()
        ]  # fmt: skip
        stages.append(costs.bench(len(entries) + len(missing)))
    return costs.estimated(stages, out, begun, waiting)


def _opened(
    recipe: Recipe, others: list[str], trust_remote_code: bool
) -> tuple[Recipe, Checkpoint, dict[str, Entry], list[Control]]:
    """The recipe that opened the models, the first of them, all that are measured, and the controls that are to be tuned, once
    all inputs are there."""
    with busy("opening the models"):
        recipe, base, beside = open_compared(recipe, others, trust_remote_code)
    entries = {"base": Entry(base.model, display_name(base.name))}
    for label, other in beside.items():
        plan = Path(other.name) / PLAN
        source = other.model if isinstance(other, Checkpoint) else other
        entries[label] = Entry(source, display_name(other.name), Plan.read(plan) if plan.exists() else None)
    check(recipe, base)
    try_out(recipe.bench)
    return recipe, base, entries, controls_of(recipe, base, {label: other.name for label, other in beside.items()})


def _finished(out: Path, settings: dict[str, Any], now: dict[str, Conditions]) -> Report | None:
    """The report in the folder, if it is of the same settings and models."""
    try:
        report = Report.read(out / REPORT, unsealed="refuse") if (out / REPORT).exists() else None
    except UserError:  # damaged, or of another version
        return None
    if report is None or report.provenance.recipe != settings:
        return None
    return report if {name: model.conditions for name, model in report.models.items()} == now else None
