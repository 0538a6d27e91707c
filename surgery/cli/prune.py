"""surgery prune"""

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.console import show, starting, table
from surgery.cli.options import ModelArgument, Out, Overwrite, RecipeOption, Settings, Trust, check_there, recipe_of


def prune(
    model: ModelArgument,
    ranking: Annotated[
        Path | None,
        typer.Option("--ranking", help="A ranking.json: keep only its gather and aggregate heads.", callback=check_there),
    ] = None,
    recipe: RecipeOption = None,
    settings: Settings = None,
    out: Out = None,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Find the smallest model that still retrieves.

    Also measures what each of its layers is worth. Writes pruning.json into --out (runs/prune-<model>).

    Examples:
      surgery prune checkpoints/tiny-mamba2 --ranking runs/located/ranking.json
    """
    options = recipe_of("prune", recipe, settings, model=model)
    with starting():
        from surgery.studies.prune_model import PRUNING, prune_model
    out = out or Path("runs") / f"prune-{Path(model).name}"
    pruning = prune_model(options, ranking, out, overwrite=overwrite, trust_remote_code=trust_remote_code)
    cuts = [pruning.base, *pruning.shortened, *pruning.left_out, *pruning.kept.values(), *pruning.last_row.values()]
    table(
        ["what is left", "retrieval", "knowledge"],
        [[cut.what, str(cut.retrieval.accuracy), str(cut.knowledge.accuracy)] for cut in cuts],
    )
    show(f"Layers: {pruning.kinds}. Minimal model: the first {pruning.minimal}. All of it: {out / PRUNING}")
