"""surgery.run: a run that says what its stages will cost."""

from collections.abc import Mapping
from pathlib import Path

from surgery.costs.announced import Announced
from surgery.evaluation.report import Report
from surgery.jobs import run as job
from surgery.records.recipe import Recipe


def run(
    recipe: Recipe, out: str | Path, *, verify: str = "auto", resume: bool = False, overwrite: bool = False,
    trust_remote_code: bool = False, papers: Mapping[str, str] | None = None, anyway: bool = False,
) -> Report:  # fmt: skip
    """Do everything. Writes into `out`: ranking.json, atlas.png, mixing.png, plan.json, report.json, report.md, report.html,
    mixing.json, grafts.png, retrieval.png, cost.png, the tuning logs, and hybrid/, the exported checkpoint. Processes that
    accelerate started share the work.

    verify: how the export is, as surgery.export takes it. resume: go on with an earlier run in `out`, from the first stage
    whose own settings are others. overwrite: remove what an earlier run has left there. papers: files that are to stand beside
    the report, by name. anyway: go on for hours, too, where the base is at chance on what locates its heads. Raises UserError,
    and writes nothing, where an earlier run is there and neither is given, or where the disk has no room for the export.
    """
    return job.run(
        recipe, out, verify=verify, resume=resume, overwrite=overwrite, trust_remote_code=trust_remote_code, papers=papers,
        anyway=anyway, observe=Announced,
    )  # fmt: skip
