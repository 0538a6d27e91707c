"""What the folder of a hybrid says of itself, for exporting it in another form."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.evaluation.report import Report
from surgery.exporting.folder import RECORD, Exported, check, check_report
from surgery.exporting.source import is_patch
from surgery.loading.digests import dtypes
from surgery.records.names import on_hub
from surgery.records.plan import Plan
from surgery.records.recipe import read_recipe
from surgery.runtime.progress import say
from surgery.splicing.load import plan_of
from surgery.splicing.remembered import PLAN


def present(base: str, hybrid: str) -> str:
    """The base's name, if it can be loaded: an id of the Hub, or a folder that exists. Raises UserError for any other."""
    if on_hub(base) or Path(base).is_dir():
        return base
    raise UserError(f"the base of {hybrid} is not here ({base}): say where it is (--base)")


def holds_base(name: str) -> bool:
    """Whether the base's tensors are all in a hybrid's folder, as they were: not where a layer graft replaced some of them, the
    plan cut their state, or adapters were merged into them. Where it does not say, it is one without adapters."""
    folder = Path(name)
    plan = plan_of(folder)
    if plan.kept_state:
        return False
    if plan.kind == "layer" or plan.provenance is None or not (folder / RECORD).exists():
        return plan.kind != "layer"
    return Exported.read(folder / RECORD, unsealed="take").base_unchanged


def advise_tuning(name: str) -> None:
    """Say so if a hybrid's attention started at random and was, by what its folder says, never tuned: it is worse than its
    base."""
    folder = Path(name)
    if not is_patch(name) and not (folder / PLAN).exists():  # a base, or a model from elsewhere
        return
    plan = plan_of(folder)
    if plan.init == "random" and not (folder / "recipe.yaml").exists():
        say(f"{name}: its attention started at random, and no tuning is on record; tune it before use: surgery tune {name}")


def papers_of(name: str, model: PreTrainedModel, digest: str) -> dict[str, Any]:
    """Recipe, report and figures that go with the same weights in another form; nothing, and a line that says so, if the folder
    is no longer what was verified: they may then be about another model. Nor do report and figures go with another dtype.

    model: what was loaded from there. digest: the model's.
    """
    folder = Path(name)
    papers: dict[str, Any] = {}
    if not (folder / RECORD).exists():
        return {}
    try:
        check(folder)
    except UserError as error:
        say(f"recipe and report stay behind: {error}")
        return {}
    if (folder / "recipe.yaml").exists():
        try:
            papers["recipe"] = read_recipe(folder / "recipe.yaml")
        except UserError as error:  # with a setting that went
            say(f"the recipe stays behind: {error}")
    if (folder / "report.json").exists():
        report = Report.read(folder / "report.json", unsealed="refuse")
        try:
            check_report(report, digest, dtypes(model))
        except UserError as error:
            say(f"report and figures stay behind: {error}")
            return papers
        papers["report"] = report
    return papers | {"figures": folder}


def report_on(model: PreTrainedModel, digest: str, plan: Plan | None, path: Path) -> Report:
    """A report of bench about a hybrid with this digest. Raises UserError if it measured other weights, or is not as it was
    written."""
    report = Report.read(path, unsealed="refuse")
    origin = None if plan is None else plan.provenance
    if origin is not None and origin.base_fingerprint != report.provenance.base_fingerprint:
        raise UserError(f"{path} is a report on another base, {report.provenance.base}")
    try:
        check_report(report, digest, dtypes(model))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return report
