"""Locates into a folder: writes the ranking and its figures, and reads the ranking again where a run is resumed."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from surgery.errors import UserError
from surgery.evaluation import views
from surgery.jobs.opening import advise_base, open_checkpoint
from surgery.jobs.output_folder import begin, check_folder, withdrawn_if_refused
from surgery.jobs.stages import first_change, first_difference, shown
from surgery.loading.opened import Checkpoint
from surgery.locating.locate import check_locatable, rank
from surgery.locating.questions import check_questions, probe_in_words, question_sets, questions_digest
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.records.names import strip_paths
from surgery.records.recipe import Locate, Recipe
from surgery.runtime.ownership.files import tidy
from surgery.runtime.processes import on_main
from surgery.runtime.progress import busy, say

RANKING = "ranking.json"


def located(
    recipe: Recipe, base: Checkpoint, out: Path, *, resume: bool = False, figures: bool = True, subject: Subject | None = None
) -> Ranking:
    """Locate, and write ranking.json into `out`, with `figures` also atlas.png and mixing.png. Until then, what is measured is
    kept in out/locate. With `resume`, nothing of it is measured again, and a ranking that is there is only read, if it is of
    the same weights, questions and settings of locating, by the same kernels and code. Of several processes, the main one
    writes. subject: of the base, if there is one already.

    Raises UserError for a ranking, or a part of one, that is not as it was measured."""
    path, kept, settings = out / RANKING, out / "locate", strip_paths(recipe.model_dump(mode="json"))
    subject = subject or Subject.of(base, known_fingerprint=base.fingerprint)

    def earlier_ranking() -> Ranking | None:
        if not resume:
            tidy(kept)
        if not resume or not path.exists():
            return None
        earlier = Ranking.read(path, unsealed="refuse")
        if (other := _outdated(earlier, recipe, subject)) is not None:
            say(f"{path} is of another {other}: locating again")
            return None
        _discard(kept, path)
        return earlier

    if (ranking := on_main(earlier_ranking)) is not None:
        return ranking
    options, shape = recipe.locate, subject.anatomy
    heads = f"{len(shape.coordinates[0]):,} heads in {len(shape.layers())} layers"
    say(f"locating: {options.examples} questions of {probe_in_words(options.probe, options.options)}, {heads}")
    ranking = rank(subject, recipe.locate, data=recipe.data, seed=recipe.seed, recipe=settings, kept=kept)

    def write() -> None:
        if figures:
            with busy("drawing the atlas"):
                views.located(base, ranking, out)
        ranking.write(path)
        _discard(kept, path)

    on_main(write)
    return ranking


def _discard(kept: Path, ranking: Path) -> None:
    """Remove what was kept until the ranking was there. What is not ours stays; so does what the system refuses to remove."""
    with suppress(UserError):
        tidy(kept)
    if kept.exists():
        say(f"{ranking} is complete; what is left in {kept} is not ours, or cannot be removed")


def _outdated(ranking: Ranking, recipe: Recipe, subject: Subject) -> str | None:
    """What a ranking depends on that is not the same now; None if all of it is. Model, tokenizer, dtype and device are in its
    conditions, whatever the recipe calls them."""
    earlier, now = dict(ranking.provenance.recipe or {}), strip_paths(recipe.model_dump(mode="json"))
    if "locate" in earlier:  # with what older versions did not have
        try:
            earlier["locate"] = Locate.model_validate(earlier["locate"]).model_dump(mode="json")
        except ValidationError:  # a setting that went, which was not at its default
            return "version"
    compared = [(earlier.get(section), now[section], section) for section in ("seed", "kernels", "locate")]
    compared.append((earlier.get("data", {}).get("skills"), now["data"]["skills"], "data.skills"))
    for before, after, name in compared:
        if (difference := first_difference(before, after, name)) is not None:
            return f"{difference[0]} ({shown(difference[1])})"
    if ranking.conditions is None:
        return "version"
    if (other := ranking.conditions.differs(subject.conditions)) is not None:
        return other
    sets = question_sets(subject.tokenizer, recipe.locate, seed=recipe.seed, device=subject.model.device)
    return None if ranking.questions == questions_digest(sets) else "set of questions"


@withdrawn_if_refused
def locate_model(
    recipe: Recipe, out: Path, *, resume: bool = False, overwrite: bool = False, trust_remote_code: bool = False
) -> tuple[Ranking, Checkpoint]:
    """What `surgery locate` does: rank the heads of the recipe's model into `out`. Returns the model as well.

    resume: go on with an earlier search in `out`. overwrite: remove what it has left there. Raises UserError, and writes
    nothing, where one is there and neither is given.
    """
    on_main(partial(check_folder, out, "locate", resume=resume, overwrite=overwrite))
    with busy("opening the model"):
        base = open_checkpoint(recipe, trust_remote_code)
    advise_base(base)
    check_locatable(base.model, recipe.locate.exact, recipe.locate.init)
    check_questions(base.tokenizer, recipe.locate, recipe.seed)
    if resume and (out / RANKING).exists():
        on_main(partial(Ranking.read, out / RANKING, unsealed="refuse"))  # a damaged one is refused before anything is written
    earlier = begin(out, "locate", recipe, resume=resume, overwrite=overwrite)
    if earlier and (change := first_change(earlier, recipe, ("locate",))) is not None:
        say(str(change))
    return located(recipe, base, out, resume=resume), base
