"""surgery plan"""

from typing import TYPE_CHECKING

from surgery.cli.console import show, starting
from surgery.cli.options import Out, PlaceArgument, RecipeOption, Settings, recipe_of
from surgery.errors import UserError

if TYPE_CHECKING:
    from surgery.locating.ranking import Ranking
    from surgery.records.plan import Plan
    from surgery.records.recipe import Recipe


def plan(ranking: PlaceArgument, recipe: RecipeOption = None, out: Out = None, settings: Settings = None) -> None:
    """Decide which heads become attention.

    Writes plan.json beside the ranking. The seed is the ranking's, unless it is set. With plan.heads=auto the ranked model is
    opened, and heads are added until the next one is not worth its cache.

    Examples:
      surgery plan runs/located/ranking.json --out plan.json
      surgery plan runs/located/ranking.json --set plan.sites=L1.H3,6
      surgery plan runs/located/ranking.json --set plan.heads=auto
    """
    from surgery.locating import planning
    from surgery.locating.ranking import Ranking
    from surgery.records.plan import PLAN

    ranked = Ranking.read(ranking)
    options = recipe_of("plan", recipe, settings, model=ranked.provenance.base)
    seed = options.seed if "seed" in options.model_fields_set else None  # the ranking's
    chosen = _grown(options, ranked, seed) if options.plan.grows else planning.plan(ranked, **options.plan.given(), seed=seed)
    out = out or ranking.with_name(PLAN)
    chosen.write(out)
    show(f"attention at {', '.join(map(str, chosen.sites))}: {out}")


def _grown(options: "Recipe", ranked: "Ranking", seed: int | None) -> "Plan":
    """The plan that heads are added to, by measuring the ranked model."""
    with starting():
        from surgery.jobs.opening import open_base
        from surgery.jobs.planning_stage import planned
        from surgery.kernels.dispatch import use
        from surgery.runtime.progress import busy

    with use(**options.kernels):
        with busy("opening the model"):
            base = open_base(options)
        if base.fingerprint != ranked.provenance.base_fingerprint:
            raise UserError(f"{options.model} is not what was ranked: the fingerprints differ")
        return planned(options, base, ranked, seed=ranked.provenance.seed if seed is None else seed)
