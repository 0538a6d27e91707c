"""Prunes a model into a folder, as `surgery prune` does."""

from functools import partial
from pathlib import Path

from surgery.jobs.opening import open_checkpoint
from surgery.jobs.output_folder import begin, check_folder, withdrawn_if_refused
from surgery.locating.heads import ROLES
from surgery.locating.questions import check_questions, choice_probe
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.probes.knowledge import Knowledge
from surgery.records.recipe import Recipe
from surgery.runtime.processes import on_main
from surgery.runtime.progress import busy, say
from surgery.studies.prune import Pruning, prune

PRUNING = "pruning.json"


@withdrawn_if_refused
def prune_model(
    recipe: Recipe, ranking: Path | None, out: Path, *, overwrite: bool = False, trust_remote_code: bool = False
) -> Pruning:
    """Find the minimal model of the recipe's model and write pruning.json into `out`. ranking: of locate, whose gather and
    aggregate heads are kept alone. overwrite: replace an earlier run in `out`; without, it raises UserError for one."""
    on_main(partial(check_folder, out, "prune", overwrite=overwrite, resumable=False))
    ranked = Ranking.read(ranking) if ranking else None
    with busy("opening the model"):
        base = open_checkpoint(recipe, trust_remote_code)
    choice_probe(base.tokenizer, recipe.locate.probe, recipe.locate.options)
    check_questions(base.tokenizer, recipe.locate, recipe.seed)
    gather, aggregate = (
        [ranked.columns.site(i) for i in ranked.columns.with_role(role)] if ranked else [] for role in ROLES[1:]
    )
    subject = Subject.of(base, known_fingerprint=base.fingerprint)
    layers = len(subject.anatomy.blocks)
    say(f"pruning: up to {layers} shorter models, then each without one of its layers, on {recipe.locate.examples} questions")
    pruning = prune(
        subject, recipe.locate, Knowledge(recipe.data.facts), gather=gather, aggregate=aggregate, seed=recipe.seed,
        recipe=recipe.model_dump(mode="json"),
    )  # fmt: skip
    # Only now: a model that does not retrieve, or lacks a ranking's heads, is refused, and nothing is kept in between.
    begin(out, "prune", recipe, overwrite=overwrite, resumable=False)
    on_main(partial(pruning.write, out / PRUNING))
    return pruning
