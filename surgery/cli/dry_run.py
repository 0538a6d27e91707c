"""--dry-run, of the verbs that have it: what the work would cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgery.cli.console import prose, show, table
from surgery.errors import UserError

if TYPE_CHECKING:
    from surgery.costs.record import CostEstimate

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what it would cost: time, memory and disk, stage by stage; write nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON instead of a table.")]


def check_json(as_json: bool, dry_run: bool) -> None:
    """Raise UserError for --json alone."""
    if as_json and not dry_run:
        raise UserError("--json prints what --dry-run finds out; give both")


def show_estimate(estimate: "CostEstimate", as_json: bool) -> None:
    """Print it."""
    if as_json:
        show(estimate.text().rstrip())
        return
    table(*estimate.table())
    for line in estimate.lines():
        prose(line)
    tunes = any(stage.name.startswith("tune ") for stage in estimate.stages)
    timed = "a forward and a few steps of tuning" if tunes else "forwards"
    prose(f"Counted from the recipe, with {timed} timed here. Nothing was written.")


def say_what_is_there(out: Path, verb: str, resume: bool, overwrite: bool) -> None:
    """Of an output folder that is not empty: what the work itself would say of it, or leave out."""
    from surgery.jobs.output_folder import check_folder, is_empty
    from surgery.runtime.progress import say

    try:
        check_folder(out, verb, resume=resume, overwrite=overwrite)
    except UserError as error:
        say(f"note: without --dry-run this would stop at once: {error}")
        return
    if resume and not is_empty(out):
        say("note: these are the costs of the whole run; --resume skips what is finished")
