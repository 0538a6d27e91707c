"""surgery export"""

from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.console import show
from surgery.cli.options import (
    HybridArgument,
    OutRequired,
    RecipeOption,
    ReplaceExport,
    Settings,
    Trust,
    Verify,
    recipe_of,
)
from surgery.errors import UserError
from surgery.exporting.formats import DESCRIPTIONS as FORMATS
from surgery.exporting.formats import check_way
from surgery.records.reading import check_name


def export(
    hybrid: HybridArgument, out: OutRequired,
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "hf",
    old_form: Annotated[str | None, typer.Option("--as", hidden=True)] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Its base, if not as the hybrid says: a folder or, to be published, a Hub id.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Of bench: what was measured, for the card.", callback=check_name)
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Divide weights into files of at most this, e.g. 2GB.")
    ] = None,
    verify: Verify = "auto",
    prove: Annotated[
        str | None, typer.Option("--prove", help="Serving engines that are to prove the folder too, e.g. vllm.")
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option("--engine-python", help="The Python of an environment that has the engines.")
    ] = None,
    recipe: RecipeOption = None, settings: Settings = None, overwrite: ReplaceExport = False,
    trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Write a hybrid in another format, and verify it.

    A patch is joined to its base first.

    Examples:
      surgery export tuned --format patch --out patch
    """
    if old_form is not None:
        from surgery.runtime.progress import say

        say("advice: --as is now --format; old names are read until version 1.0")
        form = old_form
    check_way(verify)
    if form not in FORMATS:
        raise UserError(f"cannot export as '{form}'; there are {', '.join(FORMATS)}")
    from surgery.exporting import export as exporting
    from surgery.exporting.earlier import check_replaceable
    from surgery.exporting.engines import check_engines
    from surgery.exporting.source import advise_tuning, base_of, is_patch, papers_of, present, report_on
    from surgery.jobs.opening import open_checkpoint
    from surgery.loading.checkpoint import plan_of
    from surgery.loading.digests import identify

    engines = [engine.strip() for engine in prove.split(",")] if prove is not None else []
    check_engines(engines, form, engine_python)
    check_replaceable(out, overwrite)
    advise_tuning(hybrid)
    plan, from_patch = plan_of(hybrid), is_patch(hybrid)
    loaded = open_checkpoint(
        recipe_of("export", recipe, settings, model=hybrid), trust_remote_code, base if from_patch else None
    )
    identity = identify(loaded.model)  # once: a pass over all weights
    papers = papers_of(hybrid, loaded.model, identity.digest)
    if report is not None:
        papers |= {"report": report_on(loaded.model, identity.digest, plan, report), "figures": report.parent}
    base_name = base_of(hybrid) if base is None or (from_patch and form != "patch") else base
    if form == "patch":
        present(base_name, hybrid)
    options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    exporting.export(
        loaded.model, out, format=form, tokenizer=loaded.tokenizer, plan=plan, base=base_name, identity=identity,
        verify=verify, engines=engines, engine_python=engine_python, **papers, **options,
    )  # fmt: skip
    show(f"{form}: {out}")
