"""surgery run"""

from pathlib import Path

from surgery.cli.console import prose, show, starting, table
from surgery.cli.options import Out, Overwrite, Resume, Settings, Trust, Verify, check_verify, recipe_of


def run(
    recipe: Path,
    out: Out = None,
    settings: Settings = None,
    verify: Verify = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Do everything that a recipe says.

    That is the main job (locate, plan, splice, tune, bench, export) or a study. The output goes to runs/<recipe>.

    Examples:
      surgery run recipes/demo.yaml
    """
    check_verify(verify)
    out = out or Path("runs") / recipe.stem
    with starting():
        from surgery.evaluation import markdown
        from surgery.evaluation.judgement import did_it_help
        from surgery.jobs import run as job
        from surgery.studies.conduct import FIGURE, FINDINGS, conduct

        options = recipe_of("run", recipe, settings)
    if options.study is not None:
        findings = conduct(options, out, resume=resume, overwrite=overwrite, trust_remote_code=trust_remote_code)
        table(*findings.table())
        show(f"{findings.summary}\nFindings: {out / FINDINGS}, figure: {out / FIGURE}")
        return
    report = job.run(options, out, verify=verify, resume=resume, overwrite=overwrite, trust_remote_code=trust_remote_code)
    table(*markdown.rows(report))
    prose(markdown.EXPLANATION)
    show("")
    for name, model in report.models.items():
        sites = f" ({markdown.places(model.plan)})" if model.plan else ""
        show(f"{name}: {model.description}{sites}")
    show("")
    prose(did_it_help(report))
    show(f"\nReport: {out / 'report.html'} (and .md, .json)\nHybrid: {out / 'hybrid'}")
