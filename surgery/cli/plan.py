"""surgery plan"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgery.cli.console import prose, show, starting
from surgery.cli.options import Out, PlaceArgument, RecipeOption, Settings, recipe_of
from surgery.errors import UserError
from surgery.records.reading import check_name

if TYPE_CHECKING:
    from surgery.locating.ranking import Ranking
    from surgery.records.plan import Plan
    from surgery.records.recipe import Recipe


def plan(
    ranking: PlaceArgument, recipe: RecipeOption = None, out: Out = None, settings: Settings = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="The ranked model, if it has to be measured and was moved.", callback=check_name),
    ] = None,
) -> None:  # fmt: skip
    """Decide which heads become attention, and which of a model's own attention forget.

    Writes plan.json next to the ranking. The seed is the ranking's, unless it is set. Some settings open the ranked model and
    measure it: plan.heads=auto adds heads until the next one is not worth its cache, plan.by chooses heads in another way
    (surgery list ways), plan.state_size finds the dimensions of the state that text needs, and plan.kind=window finds
    attention heads that can have a window (section plan.window), so that the cache shrinks.

    Examples:
      surgery plan runs/located/ranking.json --out plan.json
      surgery plan runs/located/ranking.json --set plan.sites=L1.H3,6
    """
    from surgery.locating import planning
    from surgery.locating.ranking import Ranking
    from surgery.records.plan import PLAN, Plan

    ranked = Ranking.read(ranking)
    options = recipe_of("plan", recipe, settings, model=base or ranked.provenance.base)
    seed = options.seed if "seed" in options.model_fields_set else None  # the ranking's
    measures = options.plan.opens
    if base is not None and not measures:
        raise UserError(
            "--base is for plan.heads=auto, plan.by, plan.state_size and windows, which take the ranked model; leave it out"
        )
    out = out or ranking.with_name(PLAN)
    Plan.check_place(out)
    chosen = _measured(options, ranked, seed) if measures else planning.plan(ranked, **options.plan.given(), seed=seed)
    chosen.write(out)
    parts = [f"attention at {', '.join(map(str, chosen.sites))}"] * bool(chosen.sites)
    parts += [] if chosen.windows is None else [str(chosen.windows)]
    show(f"{'; '.join(parts)}: {out}")
    for skill, heads in chosen.at_risk.items():
        prose(
            f"At risk: {skill}. Grafts without a gate at {', '.join(heads)} cost the base that skill, untrained. "
            "plan.heads=auto looks for a plan that keeps it."
        )


def _measured(options: "Recipe", ranked: "Ranking", seed: int | None) -> "Plan":
    """The plan whose heads are found by measuring the ranked model."""
    with starting():
        from surgery.jobs.opening import as_ranked, open_base
        from surgery.jobs.planning_stage import planned
        from surgery.kernels.dispatch import use
        from surgery.records.names import on_hub
        from surgery.runtime.progress import busy

    if not (Path(options.model).exists() or on_hub(options.model)):
        by = f"plan.by={options.plan.by}" if options.plan.measures else "plan.state_size"
        by = "plan.window" if options.plan.window is not None else by
        setting = "plan.heads=auto" if options.plan.grows else by
        raise UserError(f"{setting} measures the ranked model, and there is no {options.model} here; give --base")
    with use(**options.kernels):
        with busy("opening the model"):
            base = open_base(as_ranked(ranked.provenance, options))
        if base.fingerprint != ranked.provenance.base_fingerprint:
            raise UserError(f"{options.model} is not what was ranked, or in another dtype: the fingerprints differ")
        return planned(options, base, ranked, seed=ranked.provenance.seed if seed is None else seed)
