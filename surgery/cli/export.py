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
    check_there,
    recipe_of,
)
from surgery.exporting.formats import check_format, names, writes_bases
from surgery.exporting.verifications import check_way
from surgery.records.reading import check_name


def export(
    hybrid: HybridArgument, out: OutRequired,
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(names())}.")] = "hf",
    base: Annotated[
        str | None, typer.Option(
            "--base", help="Its base, if not where the hybrid says: a folder, or a Hub id for publishing.", callback=check_name
        )
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="A report.json of bench, for the card.", callback=check_there)
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Divide weights into files of at most this, e.g. 2GB.")
    ] = None,
    verify: Verify = "auto",
    prove: Annotated[
        str | None, typer.Option("--prove", help="Also verify the folder in these serving engines: llama_cpp, mlx_lm, vllm.")
    ] = None,
    engine_python: Annotated[
        str | None,
        typer.Option("--engine-python", help="The Python that has the engines installed, or ENGINE=PYTHON,ENGINE=PYTHON."),
    ] = None,
    recipe: RecipeOption = None, settings: Settings = None, overwrite: ReplaceExport = False,
    trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Write a hybrid in another format, and verify it.

    A patch is joined to its base first. As gguf, bases can be written too.

    Examples:
      surgery export tuned --format patch --out patch
    """
    check_way(verify)
    check_format(form)
    from surgery.commands.hybrid_folder import advise_tuning, papers_of, present, report_on
    from surgery.exporting import export as exporting
    from surgery.exporting.engines import check_engines, read_pythons
    from surgery.exporting.source import base_of, is_patch
    from surgery.jobs.opening import open_checkpoint
    from surgery.loading.digests import identify
    from surgery.runtime.ownership.files import check_free
    from surgery.splicing.load import plan_of
    from surgery.splicing.remembered import PLAN

    engines = [engine.strip() for engine in prove.split(",")] if prove is not None else []
    pythons = read_pythons(engine_python)
    check_engines(engines, form, pythons)
    check_free(out, overwrite=overwrite)
    advise_tuning(hybrid)
    from_patch = is_patch(hybrid)
    plan = plan_of(hybrid) if not writes_bases(form) or from_patch or (Path(hybrid) / PLAN).exists() else None
    loaded = open_checkpoint(
        recipe_of("export", recipe, settings, model=hybrid), trust_remote_code, base if from_patch else None
    )
    identity = identify(loaded.model)  # once: a pass over all weights
    papers = papers_of(hybrid, loaded.model, identity.digest)
    if report is not None:
        papers |= {"report": report_on(loaded.model, identity.digest, plan, report), "figures": report.parent}
    base_name = base
    if base_name is None or (from_patch and form != "patch"):
        base_name = hybrid if plan is None else base_of(hybrid)
    if form == "patch":
        present(base_name, hybrid)
    options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    exporting.export(
        loaded.model, out, format=form, tokenizer=loaded.tokenizer, plan=plan, base=base_name, identity=identity,
        verify=verify, engines=engines, engine_python=pythons, **papers, **options,
    )  # fmt: skip
    show(f"{form}: {out}")
