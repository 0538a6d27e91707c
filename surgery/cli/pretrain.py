"""surgery pretrain"""

from typing import Annotated

import typer

from surgery.cli.console import show
from surgery.cli.options import OutRequired, PlaceArgument, check_writable


def pretrain(
    recipe: PlaceArgument, out: OutRequired,
    finish: Annotated[
        bool, typer.Option("--finish", help="Let the learning rate fall from the present step on, and end.")
    ] = False,
) -> None:  # fmt: skip
    """Train a model from scratch.

    A built-in reference model learns the small world in tens of minutes on a CPU. With text of your own (section corpus of the
    recipe) it takes as long as you let it: interrupt it, and the same command goes on; --finish ends it.

    Examples:
      surgery pretrain recipes/tiny-mamba2.yaml --out runs/tiny-mamba2
    """
    from surgery.pretraining import pretrain as pretraining
    from surgery.pretraining.recipe import read_pretrain_recipe

    options = read_pretrain_recipe(recipe)
    pretraining.check_place(out)
    check_writable(out.parent)
    for name, value in pretraining.pretrain(options, out, finish=finish).items():
        show(f"{name}: {value}")
