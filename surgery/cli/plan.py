"""surgery plan"""

from surgery.cli.console import show
from surgery.cli.options import Out, PlaceArgument, RecipeOption, Settings, recipe_of


def plan(ranking: PlaceArgument, recipe: RecipeOption = None, out: Out = None, settings: Settings = None) -> None:
    """Decide which heads become attention.

    Writes plan.json beside the ranking. The seed is the ranking's, unless it is set.

    Examples:
      surgery plan runs/located/ranking.json --out plan.json
      surgery plan runs/located/ranking.json --set plan.sites=L1.H3,6
    """
    from surgery.locating import planning
    from surgery.locating.ranking import Ranking
    from surgery.records.plan import PLAN

    ranked = Ranking.read(ranking)
    options = recipe_of("plan", recipe, settings, model=ranked.provenance.base)
    seed = options.seed if "seed" in options.model_fields_set else None  # the ranking's
    chosen = planning.plan(ranked, **options.plan.model_dump(), seed=seed)
    out = out or ranking.with_name(PLAN)
    chosen.write(out)
    show(f"attention at {', '.join(map(str, chosen.sites))}: {out}")
