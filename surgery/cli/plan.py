"""surgery plan"""

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import (
    OutFile,
    Overwrite,
    RankingArgument,
    RecipeOption,
    Settings,
    Trust,
    check_model,
    open_model,
    read_record,
    refuse_hybrid,
)
from surgery.errors import UserError
from surgery.records.ranking import Ranking
from surgery.records.recipe import HUB_ID, read_recipe
from surgery.runtime.files import check_output_file
from surgery.runtime.progress import show


def plan(
    ranking: RankingArgument,
    base: Annotated[str | None, typer.Option("--base", help="The base; by default where the ranking says.")] = None,
    out: OutFile = Path("plan.json"),
    recipe: RecipeOption = None,
    settings: Settings = [],  # noqa: B006
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Choose the heads that get attention, and set how it starts.

    The text of data.train_text says when a graft stays closed (plan.share).

    Examples:
      surgery plan runs/mine/ranking.json --set plan.heads=2 --out runs/mine/plan.json
    """
    ranked = read_record(ranking, Ranking)
    model = base or (ranked.provenance.base if ranked.provenance else None)
    if model is None:
        raise UserError(f"{ranking} does not say which base it is of; say it with --base")
    if base is None and not HUB_ID.fullmatch(model) and not Path(model).exists():
        raise UserError(f"{ranking} is of {model}, which is not here; say where it is with --base")
    check_model(model)
    refuse_hybrid(model)
    options = read_recipe(recipe, settings, model=model)
    check_output_file(out, [model, ranking, *([recipe] if recipe else [])], overwrite=overwrite, marks=("sites", "starts"))
    from surgery.models.digests import fingerprint
    from surgery.pipeline import choose_plan

    opened, tokenizer = open_model(model, options, trust_remote_code)
    print_ = fingerprint(opened)
    if ranked.provenance is not None and ranked.provenance.is_of_other(print_):
        raise UserError(f"{ranking} was made from {ranked.provenance.base} with other weights than {model} has; locate again")
    chosen = choose_plan(opened, tokenizer, ranked, options, print_)
    chosen.write(out)
    how = "attention in place of the mixer" if chosen.kind == "layer" else f"gated attention, g = {chosen.gate:g}"
    for site in chosen.sites:
        show(f"{site}: {how}")
    show(f"Plan: {out}")
