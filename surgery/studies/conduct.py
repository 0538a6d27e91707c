"""Conducts the study that a recipe names: measures, writes findings.json, draws figure.png."""

from functools import partial
from pathlib import Path

from surgery.errors import UserError
from surgery.jobs.opening import open_beside, open_checkpoint
from surgery.jobs.output_folder import begin, check_folder, withdrawn_if_refused
from surgery.kernels.dispatch import use
from surgery.loading.digests import conditions, model_digest
from surgery.records.names import strip_paths
from surgery.records.recipe import Recipe
from surgery.records.record import provenance
from surgery.runtime.processes import on_main
from surgery.runtime.progress import busy, say
from surgery.studies import make
from surgery.studies.study import Findings, Subjects

FINDINGS, FIGURE = "findings.json", "figure.png"


@withdrawn_if_refused
def conduct(
    recipe: Recipe, out: Path, *, resume: bool = False, overwrite: bool = False, trust_remote_code: bool = False
) -> Findings:
    """Conduct the recipe's study and write findings.json and figure.png to `out`.

    resume: read the findings in `out` instead of measuring again, if recipe, models, kernels and code are the same. overwrite:
    remove what an earlier run has left in `out`.

    Raises UserError for a recipe without a study, for a findings file that was changed after it was written, and for a folder
    with an earlier run where neither `resume` nor `overwrite` is given."""
    if recipe.study is None:
        raise UserError("the recipe names no study")
    options = dict(recipe.study)
    study = make(options.pop("name", ""), **options)
    study.check(recipe)
    on_main(partial(check_folder, out, "run", resume=resume, overwrite=overwrite))
    with use(**recipe.kernels):
        with busy("opening the model"):
            checkpoint = open_checkpoint(recipe, trust_remote_code)
        other_name = getattr(study, "other", None)
        other = open_beside(checkpoint, other_name, recipe, trust_remote_code) if other_name else None
        begin(out, "run", recipe, resume=resume, overwrite=overwrite)
        settings = strip_paths(recipe.model_dump(mode="json"))
        measured_under = conditions(checkpoint.model, checkpoint.tokenizer)
        other_digest = model_digest(other.model) if other else None

        def read_finished() -> Findings | None:
            if not (resume and (out / FINDINGS).exists() and (out / FIGURE).exists()):
                return None
            earlier = Findings.read(out / FINDINGS, unsealed="refuse")
            comparable = (earlier.provenance.recipe, earlier.conditions, earlier.other)
            return earlier if comparable == (settings, measured_under, other_digest) else None

        if (finished := on_main(read_finished)) is not None:
            say(f"nothing has changed, and everything is finished: these are the findings in {out}")
            return finished
        subjects = Subjects(recipe, checkpoint, out, other=other, resume=resume)
        measurements = study.measure(subjects)
        findings = Findings(
            provenance=provenance(checkpoint.name, checkpoint.fingerprint, recipe.seed, settings),
            conditions=measured_under,
            other=other_digest,
            study=recipe.study["name"],
            about=measurements.about,
            summary=measurements.summary,
            rows=measurements.rows,
        )

        def write() -> None:
            study.draw(findings, out / FIGURE, subjects)
            findings.write(out / FINDINGS)

        on_main(write)
    return findings
