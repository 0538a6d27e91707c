"""surgery run"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgery.cli.console import prose, show, starting, table
from surgery.cli.dry_run import AsJson, DryRun, check_json, say_what_is_there, show_estimate
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
    from surgery.commands.run_model import Chosen


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
        bool,
        typer.Option("--anyway", help="Go on although the model is not worth editing, or at chance on the locating probe."),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Do everything that a recipe says, or choose a recipe for a model and follow it.

    That is the main job (locate, plan, splice, tune, bench, export) or a study. The output goes to runs/<recipe>. For a model,
    a quick look (`surgery look`) chooses the recipe: chosen.yaml, with a reason for each choice; --set overrides a choice. A
    model that is not worth editing is declined with exit status 1, and nothing is written; --anyway goes on.
    If the hybrid gains and loses another skill of the base, the exit status is 1, too; all files are written.

    Examples:
      surgery run recipes/demo.yaml --dry-run
      surgery run recipes/demo.yaml
      surgery run checkpoints/tiny-mamba2 --dry-run
    """
    check_way(verify)
    from surgery.loading.hub import is_model

    of_model = is_model(str(recipe))
    options = None if of_model else recipe_of("run", recipe, settings)
    with starting():
        from surgery.commands.run_model import chosen_for, run_chosen
        from surgery.costs.estimate import estimate
        from surgery.costs.run import run as run_recipe
        from surgery.evaluation import markdown
        from surgery.evaluation.judgement import did_it_help, judge
        from surgery.studies import studies
        from surgery.studies.conduct import FIGURE, FINDINGS, conduct
    out = out or Path("runs") / (recipe.name if of_model else recipe.stem)
    if text is not None and not of_model:
        raise UserError("--text is for a model; a recipe names its text itself, in data.train_text and data.held_out_text")
    check_json(as_json, dry_run)
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
        show_estimate(estimate(options, out, verify=verify, trust_remote_code=trust_remote_code), as_json)
        say_what_is_there(out, "run", resume, overwrite)
        return
    if options.study is not None:
        findings = conduct(options, out, **places)
        table(*studies()[findings.study].table(findings))
        show(f"{findings.summary}\nFindings: {out / FINDINGS}, figure: {out / FIGURE}")
        return
    if chosen is None:
        report = run_recipe(options, out, verify=verify, anyway=anyway, **places)
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
