"""Locates into a folder: writes the ranking and its figures, and reads the ranking again where a run is resumed."""

import shutil
from pathlib import Path

from surgery.jobs.stages import first_difference, shown
from surgery.loading.checkpoint import Checkpoint
from surgery.loading.digests import conditions
from surgery.locating.atlas import draw_atlas
from surgery.locating.locate import locate
from surgery.locating.questions import ask_all, questions_digest
from surgery.locating.ranking import Ranking
from surgery.records.names import public
from surgery.records.recipe import Recipe
from surgery.runtime.processes import on_main
from surgery.runtime.progress import say

RANKING = "ranking.json"


def located(recipe: Recipe, base: Checkpoint, out: Path, *, resume: bool = False, figures: bool = True) -> Ranking:
    """Locate, and write ranking.json into `out`, with `figures` also atlas.png and mixing.png. Until then, what is measured is
    kept in out/locate. With `resume`, nothing of it is measured again, and a ranking that is there is only read, if it is of
    the same weights, questions and settings of locating, by the same kernels and code. Of several processes, the main one
    writes.

    Raises UserError for a ranking, or a part of one, that is not as it was measured."""
    path, kept, settings = out / RANKING, out / "locate", public(recipe.model_dump(mode="json"))

    def earlier_ranking() -> Ranking | None:
        if not resume:
            shutil.rmtree(kept, ignore_errors=True)
        if not resume or not path.exists():
            return None
        earlier = Ranking.read(path, unsealed="refuse")
        if (other := _outdated(earlier, recipe, base)) is not None:
            say(f"{path} is of another {other}: locating again")
            return None
        return earlier

    if (ranking := on_main(earlier_ranking)) is not None:
        return ranking
    ranking = locate(
        base.model, base.tokenizer, **recipe.locate.model_dump(), seed=recipe.seed, name=base.name, recipe=settings, kept=kept
    )

    def write() -> None:
        if figures:
            draw_atlas(base.model, base.tokenizer, ranking, out)
        ranking.write(path)
        shutil.rmtree(kept, ignore_errors=True)

    on_main(write)
    return ranking


def _outdated(ranking: Ranking, recipe: Recipe, base: Checkpoint) -> str | None:
    """What a ranking depends on that is not the same now; None if all of it is. Which model, tokenizer, dtype and device it
    was, its conditions say better than the recipe's names."""
    earlier, now = ranking.provenance.recipe or {}, public(recipe.model_dump(mode="json"))
    for section in ("seed", "kernels", "locate"):
        if (difference := first_difference(earlier.get(section), now[section], section)) is not None:
            return f"{difference[0]} ({shown(difference[1])})"
    if ranking.conditions is None:
        return "version"
    if (other := ranking.conditions.differs(conditions(base.model, base.tokenizer))) is not None:
        return other
    options = recipe.locate.model_dump(exclude={"probe", "options", "exact", "confirm", "budget", "layers"})
    questions = ask_all(
        base.tokenizer, recipe.locate.probe, recipe.locate.options, seed=recipe.seed, device=base.model.device, **options
    )
    return None if ranking.questions == questions_digest(questions) else "set of questions"
