"""What the folder of a hybrid says of itself, for exporting it in another form."""

from pathlib import Path
from typing import Any

from surgery.bench.report import Report
from surgery.checkpoint import plan_of
from surgery.errors import UserError
from surgery.export.folder import RECORD, Exported, check
from surgery.origin import on_hub
from surgery.plan import Plan
from surgery.progress import say
from surgery.recipe import read_recipe
from surgery.splice.patch import RECORD as PATCH
from surgery.splice.patch import Patch


def is_patch(name: str) -> bool:
    return (Path(name) / PATCH).exists()


def base_of(name: str) -> str:
    """The name of a hybrid's base, as load() takes it: from anywhere, since the record is relative to the hybrid's folder."""
    folder = Path(name)
    if is_patch(name):
        return Patch.read(folder / PATCH).base.place(folder)
    if (folder / RECORD).exists():
        return Exported.read(folder / RECORD).base.place(folder)
    made = plan_of(folder).provenance
    return name if made is None else made.base


def there(base: str, hybrid: str) -> str:
    """The name of a base that has to be loaded. Raises UserError if it is a folder that is not there."""
    if on_hub(base) or Path(base).is_dir():
        return base
    raise UserError(f"the base of {hybrid} is not here ({base}): say where it is (--base)")


def holds_base(name: str) -> bool:
    """Whether the base's tensors are all in a hybrid's folder, as they were: not where a layer graft replaced some of them, or
    where adapters were merged into them. Where it does not say, it is one without adapters."""
    folder = Path(name)
    plan = plan_of(folder)
    if plan.kind == "layer" or plan.provenance is None or not (folder / RECORD).exists():
        return plan.kind != "layer"
    return Exported.read(folder / RECORD).base_unchanged


def papers_of(name: str) -> dict[str, Any]:
    """Recipe, report and figures that go with the same weights in another form; nothing, and a line that says so, if the folder
    is no longer what was verified: they may then be about another model."""
    folder = Path(name)
    found: dict[str, Any] = {}
    if not (folder / RECORD).exists():
        return {}
    try:
        check(folder)
    except UserError as error:
        say(f"recipe and report stay behind: {error}")
        return {}
    if (folder / "recipe.yaml").exists():
        found["recipe"] = read_recipe(folder / "recipe.yaml")
    if (folder / "report.json").exists():
        found["report"] = Report.read(folder / "report.json")
    return found | {"figures": folder}


def report_on(plan: Plan, path: Path) -> Report:
    """A report of bench about the hybrid of a plan. Raises UserError if it is about other models."""
    report = Report.read(path)
    if plan.provenance is not None and plan.provenance.base_fingerprint != report.provenance.base_fingerprint:
        raise UserError(f"{path} is a report on another base, {report.provenance.base}")
    if plan not in [model.plan for model in report.models.values()]:
        raise UserError(f"{path} measured no hybrid of this plan")
    return report
