"""surgery run"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgery.cli.console import prose, show, starting, table
from surgery.cli.options import (
    EnginePython,
    Out,
    Overwrite,
    Resume,
    Settings,
    TaskCode,
    TextOption,
    Trust,
    Verify,
    recipe_of,
    until_the_end,
)
from surgery.errors import UserError
from surgery.exporting.verifications import check_way
from surgery.records.reading import check_name
from surgery.runtime.consent import consenting

if TYPE_CHECKING:
    from surgery.jobs.costs.record import CostEstimate
    from surgery.jobs.run_model import Chosen


def run(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe's file, or a model (folder or Hub id) to choose one for.", callback=check_name)
    ],
    out: Out = None,
    text: TextOption = None,
    settings: Settings = None,
    verify: Verify = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
    engine_python: EnginePython = None,
    trust_task_code: TaskCode = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Go on where a model is not worth editing, or is at chance on what locates heads.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it would cost: time, memory and disk, stage by stage; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON instead of a table.")] = False,
) -> None:
    """Do everything that a recipe says, or for a model without one.

    That is the main job (locate, plan, splice, tune, bench, export) or a study. The output goes to runs/<recipe>. Of a model, a
    quick look (`surgery look`) comes first, and its recipe is chosen by that: chosen.yaml, with a reason for each choice, which
    --set changes. A model that is not worth editing is declined with exit status 1, and nothing is written; --anyway goes on.
    Where the hybrid gains and loses another skill of the base, the exit status is 1, too; all files are written.

    Examples:
      surgery run recipes/demo.yaml --dry-run
      surgery run recipes/demo.yaml
      surgery run checkpoints/tiny-mamba2 --dry-run
    """
    check_way(verify)
    with starting():
        from surgery.evaluation import markdown
        from surgery.evaluation.judgement import did_it_help, judge
        from surgery.jobs import run as job
        from surgery.jobs.costs.estimate import estimate
        from surgery.jobs.run_model import chosen_for, is_model, run_chosen
        from surgery.studies import studies
        from surgery.studies.conduct import FIGURE, FINDINGS, conduct

        of_model = is_model(str(recipe))
        options = None if of_model else recipe_of("run", recipe, settings)
    out = out or Path("runs") / (recipe.name if of_model else recipe.stem)
    if text is not None and not of_model:
        raise UserError("--text is for a model; a recipe names its text itself, in data.train_text and data.held_out_text")
    if as_json and not dry_run:
        raise UserError("--json prints what --dry-run finds out; give both")
    # A dry run runs nothing of others.
    until_the_end.enter_context(consenting(engine_python=engine_python, task_code=trust_task_code and not dry_run))
    places: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "trust_remote_code": trust_remote_code}
    chosen = None
    if options is None:
        parts = Path(until_the_end.enter_context(TemporaryDirectory())) if dry_run else None
        chosen = chosen_for(str(recipe), out, text=text, settings=settings or (), parts=parts, anyway=anyway, **places)
        options = chosen.recipe
        _show_chosen(chosen, as_json)
        if chosen.declined:
            raise typer.Exit(1)
    if dry_run:
        _show_estimate(estimate(options, out, verify=verify, trust_remote_code=trust_remote_code), as_json)
        _say_what_is_there(out, resume, overwrite)
        return
    if options.study is not None:
        findings = conduct(options, out, resume=resume, overwrite=overwrite, trust_remote_code=trust_remote_code)
        table(*studies()[findings.study].table(findings))
        show(f"{findings.summary}\nFindings: {out / FINDINGS}, figure: {out / FIGURE}")
        return
    if chosen is None:
        report = job.run(options, out, verify=verify, anyway=anyway, **places)
    else:
        report = run_chosen(chosen, out, verify=verify, anyway=anyway, **places)
    table(*markdown.rows(report))
    prose(markdown.EXPLANATION)
    show("")
    for name, model in report.models.items():
        sites = f" ({markdown.sites_text(model.plan)})" if model.plan else ""
        show(f"{name}: {model.description}{sites}")
    show("")
    prose(did_it_help(report))
    show(f"\nReport: {out / 'report.html'} (and .md, .json)\nHybrid: {out / 'hybrid'}")
    if any(judgement.verdict == "mixed" for judgement in judge(report)):
        raise typer.Exit(1)


def _show_chosen(chosen: "Chosen", as_json: bool) -> None:
    """What was seen of a model, and the recipe that it gave."""
    if as_json or chosen.seen is None:
        return
    for line in chosen.seen.lines():
        prose(line)
    if chosen.choices:
        show(f"\n{chosen.text()}")


def _show_estimate(estimate: "CostEstimate", as_json: bool) -> None:
    if as_json:
        show(estimate.text().rstrip())
        return
    table(*estimate.table())
    for line in estimate.lines():
        prose(line)
    prose("Counted from the recipe, with a forward and a few steps of tuning timed here. Nothing was written.")


def _say_what_is_there(out: Path, resume: bool, overwrite: bool) -> None:
    """Of an output folder that is not empty: what the run itself would say of it, or leave out."""
    from surgery.jobs.output_folder import check_folder, is_empty
    from surgery.runtime.progress import say

    try:
        check_folder(out, "run", resume=resume, overwrite=overwrite)
    except UserError as error:
        say(f"note: without --dry-run this would stop at once: {error}")
        return
    if resume and not is_empty(out):
        say("note: these are the costs of the whole run; --resume leaves out what is finished")
