"""A recipe with a `study`: measured, written down and drawn."""

from functools import partial
from pathlib import Path

from surgery.errors import UserError
from surgery.jobs.opening import open_beside, open_checkpoint
from surgery.jobs.preparing import prepare
from surgery.kernels.dispatch import use
from surgery.loading.digests import conditions, model_digest
from surgery.records.names import public
from surgery.records.recipe import Recipe
from surgery.records.record import provenance
from surgery.runtime.processes import on_main
from surgery.studies import make
from surgery.studies.study import Findings, Subjects

FINDINGS, FIGURE = "findings.json", "figure.png"


def conduct(recipe: Recipe, out: Path, *, resume: bool = False, trust_remote_code: bool = False) -> Findings:
    """Do the recipe's study: findings.json and figure.png in `out`. With `resume`, findings that are there are read, if they
    are of the same models, kernels and code. Raises UserError for findings that are not as they were written."""
    if recipe.study is None:
        raise UserError("the recipe names no study")
    options = dict(recipe.study)
    study = make(options.pop("name", ""), **options)
    study.check(recipe)
    with use(**recipe.kernels):
        checkpoint = open_checkpoint(recipe, trust_remote_code)
        second = getattr(study, "other", None)
        other = open_beside(checkpoint, second, recipe, trust_remote_code) if second else None
        on_main(partial(prepare, out, recipe, resume))
        settings = public(recipe.model_dump(mode="json"))
        under = conditions(checkpoint.model, checkpoint.tokenizer)
        beside = model_digest(other.model) if other else None

        def there() -> Findings | None:
            if not (resume and (out / FINDINGS).exists() and (out / FIGURE).exists()):
                return None
            earlier = Findings.read(out / FINDINGS, unsealed="refuse")
            same = (earlier.provenance.recipe, earlier.conditions, earlier.other) == (settings, under, beside)
            return earlier if same else None

        if (done := on_main(there)) is not None:
            return done
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
