"""Plans as a recipe says: the leading heads of a ranking, or what a way of choosing finds by measuring (surgery/choosing)."""

from functools import partial
from pathlib import Path

from surgery.choosing import way_of
from surgery.choosing.bounded import NoPlan
from surgery.choosing.task import ChoiceTask
from surgery.choosing.windows import plan_windows
from surgery.evaluation import views
from surgery.loading.opened import Checkpoint
from surgery.locating.planning import plan
from surgery.locating.ranking import Ranking
from surgery.records.growth import Growth
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.record import write_text
from surgery.runtime.processes import on_main
from surgery.tuning.state_sizes import shrink_state

FRONTIER = "frontier.json"  # what each plan gains and costs, where none is within the bounds
KEPT = "planning"  # the folder in which a run keeps what plan.heads=auto measures


def planned(recipe: Recipe, base: Checkpoint, ranking: Ranking, kept: Path | None = None, seed: int | None = None) -> Plan:
    """base: what was ranked; it is measured where plan.heads is auto, plan.by is no ranking's order or plan.state_size is
    given. kept: a folder for what is measured; where no plan is within the bounds, frontier.json and frontier.png are written
    next to it. seed: the recipe's, unless given."""
    seed = recipe.seed if seed is None else seed
    try:
        chosen = None if recipe.plan.kind == "window" else _heads(recipe, base, ranking, kept, seed)
        if recipe.plan.window is not None:
            chosen = plan_windows(
                base, ranking, recipe.plan, chosen, data=recipe.data, tuning=recipe.tune,
                batch_size=recipe.locate.batch_size, seed=seed, kept=kept,
            )  # fmt: skip
        assert chosen is not None
    except NoPlan as error:
        if kept is not None:
            on_main(partial(_write_frontier, error.growth, kept.parent))
        raise
    if (size := recipe.plan.state_size) is None:
        return chosen
    return shrink_state(base, chosen, size, data=recipe.data, text_tokens=recipe.tune.text_tokens, seed=seed)


def _write_frontier(growth: Growth, out: Path) -> None:
    write_text(out / FRONTIER, growth.model_dump_json(indent=1) + "\n")
    views.refused(growth, out)


def _heads(recipe: Recipe, base: Checkpoint, ranking: Ranking, kept: Path | None, seed: int) -> Plan:
    options = recipe.plan
    if not options.measures:
        return plan(ranking, **options.given(), seed=seed)
    task = ChoiceTask.of(
        base, ranking, options, data=recipe.data, tuning=recipe.tune, batch_size=recipe.locate.batch_size, seed=seed, kept=kept
    )
    return way_of(options.by).choose(task)
