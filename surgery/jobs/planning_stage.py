"""Plans as a recipe says: the leading heads of a ranking, those that a perfect choice would help most, or as many as are worth
their cache."""

from functools import partial
from pathlib import Path

from surgery.evaluation.frontier import write_frontier
from surgery.loading.opened import Checkpoint
from surgery.locating.planning import plan
from surgery.locating.ranking import Ranking
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.runtime.processes import on_main
from surgery.tuning.bounded import NoPlan
from surgery.tuning.choosing import by_choice
from surgery.tuning.growing import grow
from surgery.tuning.state_sizes import shrink_state

KEPT = "planning"  # the folder in which a run keeps what plan.heads=auto measures


def planned(recipe: Recipe, base: Checkpoint, ranking: Ranking, kept: Path | None = None, seed: int | None = None) -> Plan:
    """base: what was ranked; it is measured where plan.heads is auto, plan.by is choice or plan.state_size is given. kept: a
    folder for what is measured; where no plan is within the bounds, frontier.json and frontier.png are written next to it.
    seed: the recipe's, unless given."""
    seed = recipe.seed if seed is None else seed
    try:
        chosen = _heads(recipe, base, ranking, kept, seed)
    except NoPlan as error:
        if kept is not None:
            on_main(partial(write_frontier, error.growth, kept.parent))
        raise
    if (size := recipe.plan.state_size) is None:
        return chosen
    return shrink_state(base, chosen, size, data=recipe.data, text_tokens=recipe.tune.text_tokens, seed=seed)


def _heads(recipe: Recipe, base: Checkpoint, ranking: Ranking, kept: Path | None, seed: int) -> Plan:
    options = recipe.plan
    if options.by == "choice":
        return by_choice(
            base, ranking, options, data=recipe.data, tuning=recipe.tune, batch_size=recipe.locate.batch_size, seed=seed,
            kept=kept,
        )  # fmt: skip
    if not options.grows:
        return plan(ranking, **options.given(), seed=seed)
    return grow(
        base, ranking, options, data=recipe.data, tuning=recipe.tune, batch_size=recipe.locate.batch_size, seed=seed, kept=kept,
    )  # fmt: skip
