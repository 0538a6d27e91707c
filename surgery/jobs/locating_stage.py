"""Locates into a folder: writes the ranking and its figures, and reads them again where a run is resumed."""

import shutil
from pathlib import Path
from typing import Any

from surgery.loading.checkpoint import Checkpoint
from surgery.locating.atlas import draw_atlas
from surgery.locating.locate import rank
from surgery.locating.questions import question_sets, questions_digest
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.records.names import public
from surgery.records.recipe import Recipe
from surgery.runtime.processes import on_main
from surgery.runtime.progress import say

RANKING = "ranking.json"


def located(recipe: Recipe, base: Checkpoint, out: Path, *, resume: bool = False, figures: bool = True) -> Ranking:
    """Locate, and write ranking.json into `out`, with `figures` also atlas.png and mixing.png. What is measured is kept in
    out/locate until then: with `resume`, nothing of it is measured again, and a ranking that is there is only read, if it is of
    these weights and questions, by the same kernels and code. Of several processes, the main one writes.

    Raises UserError for a ranking, or a part of one, that is not as it was measured."""
    path, kept, settings = out / RANKING, out / "locate", public(recipe.model_dump(mode="json"))
    subject = Subject.of(base, known_fingerprint=base.fingerprint)

    def there() -> Ranking | None:
        if not resume:
            shutil.rmtree(kept, ignore_errors=True)
        if not resume or not path.exists():
            return None
        earlier = Ranking.read(path, unsealed="refuse")
        if (other := _outdated(earlier, recipe, subject, settings)) is not None:
            say(f"{path} is of another {other}: locating again")
            return None
        return earlier

    if (done := on_main(there)) is not None:
        return done
    ranking = rank(subject, recipe.locate, seed=recipe.seed, recipe=settings, kept=kept)

    def write() -> None:
        if figures:
            draw_atlas(base.model, base.tokenizer, ranking, out)
        ranking.write(path)
        shutil.rmtree(kept, ignore_errors=True)

    on_main(write)
    return ranking


def _outdated(ranking: Ranking, recipe: Recipe, subject: Subject, settings: dict[str, Any]) -> str | None:
    """What a ranking depends on that is not the same now; None if all of it is."""
    if ranking.provenance.recipe != settings:
        return "recipe"
    if ranking.conditions is None:
        return "version"
    if (other := ranking.conditions.differs(subject.conditions)) is not None:
        return other
    sets = question_sets(subject.tokenizer, recipe.locate, seed=recipe.seed, device=subject.model.device)
    return None if ranking.questions == questions_digest(sets) else "set of questions"
