"""surgery bench"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.console import prose, show, starting, table
from surgery.cli.dry_run import AsJson, DryRun, check_json, say_what_is_there, show_estimate
from surgery.cli.options import (
    EnginePython,
    ModelArgument,
    Out,
    Overwrite,
    RecipeOption,
    Resume,
    Settings,
    TaskCode,
    Trust,
    check_model,
    recipe_of,
    until_the_end,
)
from surgery.runtime.consent import consenting
from surgery.runtime.processes import is_main


def bench(
    base: ModelArgument,
    hybrids: Annotated[
        list[str], typer.Argument(help="Hybrids, or other models, to compare.", callback=check_model)
    ],
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require", metavar="REQUIREMENT",
            help="E.g. 'no loss', 'kv.64 >= base + 0.3', 'perplexity <= base * 1.02'; of every model but the base, or of one: "
            "'tuned.kv.64 >= 0.9'. If one is not met: exit status 1.",
        ),
    ] = None,
    recipe: RecipeOption = None, settings: Settings = None, out: Out = None, resume: Resume = False,
    overwrite: Overwrite = False, trust_remote_code: Trust = False, engine_python: EnginePython = None,
    trust_task_code: TaskCode = False,
    dry_run: DryRun = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compare models on the same examples.

    Writes report.html, .md and .json and figures into --out (runs/bench-<first hybrid>). What is measured: bench.suites
    (`surgery list suites`). The base is also tuned as each hybrid was, without a graft: a gain counts only against such a
    control. The command first says how long that takes; --set bench.controls=false leaves it out. --dry-run says what all of
    it would cost. --resume keeps what an earlier run into the same folder has measured. `accelerate launch -m surgery bench
    ...` divides the work among processes.

    Examples:
      surgery bench checkpoints/tiny-mamba2 tuned --require "kv.32 >= base"
      surgery bench checkpoints/tiny-mamba2 spliced --set bench.suites=speed
    """
    options = recipe_of("bench", recipe, settings, model=base)
    with starting():
        from surgery.commands.compared import labels
        from surgery.commands.comparison import compare, estimate_comparison
        from surgery.commands.gate import requirement
        from surgery.commands.hybrid_folder import advise_tuning
        from surgery.evaluation import markdown
        from surgery.evaluation.judgement import did_it_help
        from surgery.evaluation.suites import names
    check_json(as_json, dry_run)
    # A dry run runs nothing of others.
    until_the_end.enter_context(consenting(engine_python=engine_python, task_code=trust_task_code and not dry_run))
    out = out or Path("runs") / f"bench-{Path(hybrids[0]).name}"
    requirements = [requirement(text, list(labels(hybrids)), names(options.bench)) for text in require or []]
    for hybrid in hybrids:
        advise_tuning(hybrid)
    if dry_run:
        show_estimate(estimate_comparison(options, hybrids, out, trust_remote_code=trust_remote_code), as_json)
        say_what_is_there(out, "bench", resume, overwrite)
        return
    report = compare(options, hybrids, out, resume=resume, overwrite=overwrite, trust_remote_code=trust_remote_code)
    failures = [line for required in requirements for line in required.failures(report)]
    if is_main():
        table(*markdown.rows(report))
        show("")
        prose(did_it_help(report))
        show(f"\nReport: {out / 'report.html'} (and .md, .json)")
        for line in failures:
            print(f"surgery: {line}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)
