"""Benches models against a base, as `surgery bench` does."""

from functools import partial
from pathlib import Path

from surgery.evaluation.bench import Entry, measure
from surgery.evaluation.head_matrices import mixing
from surgery.evaluation.report import Report
from surgery.jobs.opening import open_compared
from surgery.jobs.preparing import RECIPE, check, prepare
from surgery.jobs.report_folder import write_report
from surgery.kernels.dispatch import use
from surgery.locating.example import short_question
from surgery.probes.knowledge import Part
from surgery.records.names import called, public
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.record import provenance, read_text
from surgery.records.renamed import current
from surgery.records.yaml_text import parse_yaml
from surgery.runtime.processes import on_main


def compare(recipe: Recipe, others: list[str], out: Path, *, resume: bool = False, trust_remote_code: bool = False) -> Report:
    """Bench the recipe's model against `others` on the same examples. Writes report.json, report.md, report.html and
    figures into `out`."""
    recipe, base, beside = open_compared(recipe, others, trust_remote_code)
    entries = {"base": Entry(base.model, called(base.name))}
    part: Part | None = (
        "bench" if recipe.tune.early_stopping is not None or any(map(_stopped_early, (recipe.model, *others))) else None
    )
    for label, other in beside.items():
        found = Path(other.name) / "plan.json"
        entries[label] = Entry(other.model, called(other.name), Plan.read(found) if found.exists() else None)
    check(recipe, base)
    on_main(partial(prepare, out, recipe, resume))
    with use(**recipe.kernels):
        measured = measure(
            entries, base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=out / "cells", part=part
        )
    settings = public(recipe.model_dump(mode="json"))
    made = provenance(base.name, base.fingerprint, recipe.seed, settings)
    report = Report(provenance=made, plan=None, models=measured, timings={}, training={}, settings=settings["bench"])
    example = short_question(base.tokenizer, recipe.locate.probe, recipe.locate.options, recipe.seed)
    on_main(lambda: write_report(report, out, mixing(entries, base.tokenizer, example, made)))
    return report


def _stopped_early(folder: str) -> bool:
    """Whether a hybrid's folder says that its tuning might stop early, and so asked part of the facts."""
    written = Path(folder) / RECIPE
    made = parse_yaml(read_text(written, "the recipe"), str(written)) if written.exists() else None
    tuning = current(made).get("tune") if isinstance(made, dict) else None
    return isinstance(tuning, dict) and tuning.get("early_stopping") is not None
