"""surgery export"""

from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.console import show
from surgery.cli.options import HybridArgument, OutRequired, RecipeOption, Settings, Trust, recipe_of
from surgery.errors import UserError
from surgery.exporting.formats import DESCRIPTIONS as FORMATS


def export(
    hybrid: HybridArgument, out: OutRequired,
    form: Annotated[str, typer.Option("--as", help=f"The form: {', '.join(FORMATS)}.")] = "hf",
    base: Annotated[
        str | None, typer.Option("--base", help="Its base, if not as the hybrid says: a folder or, to be published, a Hub id.")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Of bench: what was measured, for the card.")] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Divide weights into files of at most this, e.g. 2GB.")
    ] = None,
    recipe: RecipeOption = None, settings: Settings = None, trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Write a hybrid, or a patch and its base, in another form, and verify it."""
    if form not in FORMATS:
        raise UserError(f"cannot export as '{form}'; there are {', '.join(FORMATS)}")
    from surgery.exporting import export as exporting
    from surgery.exporting.source import base_of, check_base_is_here, is_patch, papers_of, report_on
    from surgery.jobs.opening import open_checkpoint
    from surgery.loading.checkpoint import plan_of

    plan, from_patch = plan_of(hybrid), is_patch(hybrid)
    loaded = open_checkpoint(
        recipe_of("export", recipe, settings, model=hybrid), trust_remote_code, base if from_patch else None
    )
    papers = papers_of(hybrid, loaded.model)
    if report is not None:
        papers |= {"report": report_on(loaded.model, plan, report), "figures": report.parent}
    base_name = base_of(hybrid) if base is None or (from_patch and form != "patch") else base
    if form == "patch":
        check_base_is_here(base_name, hybrid)
    options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    exporting.export(
        loaded.model, out, format=form, tokenizer=loaded.tokenizer, plan=plan, base=base_name, **papers, **options
    )  # fmt: skip
    show(f"{form}: {out}")
