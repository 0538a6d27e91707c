"""surgery export"""

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import (
    Dtype,
    ModelArgument,
    OutFolder,
    Overwrite,
    Trust,
    _checked,
    check_file,
    check_model,
    open_model,
    read_record,
    refuse_base,
)
from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.records.report import Report
from surgery.runtime.files import check_output
from surgery.runtime.listing import list_table
from surgery.runtime.progress import show


def export(
    hybrid: ModelArgument,
    out: OutFolder,
    format: Annotated[str, typer.Option("--format", help=", ".join(list_table("exporting/export.py", "FORMATS")))] = "hf",
    base: Annotated[str | None, typer.Option("--base", help="The base, for a patch: a folder or a Hub id.")] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="report.json that measured it, for the card.", callback=_checked(check_file)),
    ] = None,
    verify: Annotated[str, typer.Option("--verify", help="quick, or full: 64 greedy tokens, in float32.")] = "quick",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a hybrid in a format that others load, proved equal in a fresh process.

    Examples:
      surgery export runs/demo/hybrid --format patch --base checkpoints/tiny-skills --out runs/demo-patch
    """
    known = list_table("exporting/export.py", "FORMATS")
    if format not in known:
        raise UserError(f"there is no format '{format}'; there are {', '.join(known)}")
    if format in ("hf", "patch"):  # the others take bases, too
        refuse_base(hybrid)
    if base is not None:
        check_model(base)
    check_output(out, [each for each in (hybrid, base, report) if each is not None], overwrite=overwrite)
    measured = None if report is None else read_record(report, Report)
    from surgery.exporting.export import PLAN
    from surgery.exporting.export import export as export_hybrid
    from surgery.exporting.patch import RECORD, Patch, join_patch

    plan = Plan.read(Path(hybrid) / PLAN) if (Path(hybrid) / PLAN).exists() else None
    if (Path(hybrid) / RECORD).is_file():  # a patch
        if dtype != "auto":
            raise UserError("--dtype: a patch is joined in the precision that its hybrid had")
        model, tokenizer = join_patch(hybrid, base)
        base = base or Patch.read(Path(hybrid) / RECORD).base.place(Path(hybrid))
    else:
        model, tokenizer = open_model(hybrid, trust_remote_code=trust_remote_code, dtype=dtype)
        base = base or _base_of(Path(hybrid))
    proof = export_hybrid(
        model, tokenizer, out, format=format, plan=plan, report=measured, base=base, verify=verify, overwrite=overwrite
    )
    show(f"{out}: {proof}" if proof else f"{out} is written")


def _base_of(folder: Path) -> str | None:
    """What the record of an export says of its base."""
    from surgery.exporting.export import RECORD, Export

    return Export.read(folder / RECORD).base.place(folder) if (folder / RECORD).exists() else None
