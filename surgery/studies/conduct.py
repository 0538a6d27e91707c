"""A recipe with a `study`: measured, written down and drawn."""

from functools import partial
from pathlib import Path

from surgery.errors import UserError
from surgery.jobs.opening import open_beside, open_checkpoint
from surgery.jobs.output_folder import begin, check_folder
from surgery.kernels.dispatch import use
from surgery.loading.digests import conditions, model_digest
from surgery.records.names import public
from surgery.records.recipe import Recipe
from surgery.records.record import provenance
from surgery.runtime.processes import on_main
from surgery.runtime.progress import busy, say
from surgery.studies import make
from surgery.studies.study import Findings, Subjects

FINDINGS, FIGURE = "findings.json", "figure.png"


def conduct(
    recipe: Recipe, out: Path, *, resume: bool = False, overwrite: bool = False, trust_remote_code: bool = False
) -> Findings:
    """Do the recipe's study: findings.json and figure.png in `out`. With `resume`, findings that are there are read, if they
    are of the same settings, models, kernels and code. Raises UserError for findings that are not as they were written, and
    where an earlier run is there and neither `resume` nor `overwrite` (remove it first) is given."""
    if recipe.study is None:
        raise UserError("the recipe names no study")
    options = dict(recipe.study)
    study = make(options.pop("name", ""), **options)
    study.check(recipe)
    check_folder(out, "run", resume=resume, overwrite=overwrite)
    with use(**recipe.kernels):
        with busy("opening the model"):
            checkpoint = open_checkpoint(recipe, trust_remote_code)
        second = getattr(study, "other", None)
        other = open_beside(checkpoint, second, recipe, trust_remote_code) if second else None
        on_main(partial(begin, out, "run", recipe, resume=resume, overwrite=overwrite))
        settings = public(recipe.model_dump(mode="json"))
        under = conditions(checkpoint.model, checkpoint.tokenizer)
        beside = model_digest(other.model) if other else None

        def earlier_findings() -> Findings | None:
            if not (resume and (out / FINDINGS).exists() and (out / FIGURE).exists()):
                return None
            earlier = Findings.read(out / FINDINGS, unsealed="refuse")
            same = (earlier.provenance.recipe, earlier.conditions, earlier.other) == (settings, under, beside)
            return earlier if same else None

        if (findings := on_main(earlier_findings)) is not None:
            say(f"nothing has changed, and everything is finished: these are the findings in {out}")
            return findings
        subjects = Subjects(recipe, checkpoint, out, other=other, resume=resume)
        found = study.measure(subjects)
        findings = Findings(
            provenance=provenance(checkpoint.name, checkpoint.fingerprint, recipe.seed, settings),
            conditions=under,
            other=beside,
            study=recipe.study["name"],
            about=found.about,
            summary=found.summary,
            rows=found.rows,
        )

        def write() -> None:
            study.draw(findings, out / FIGURE, subjects)
            findings.write(out / FINDINGS)

        on_main(write)
    return findings
