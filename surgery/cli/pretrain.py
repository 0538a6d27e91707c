"""surgery pretrain"""

from surgery.cli.console import show
from surgery.cli.options import OutRequired, PlaceArgument, check_writable


def pretrain(recipe: PlaceArgument, out: OutRequired) -> None:
    """Train a built-in reference model from scratch.

    It learns the small world; that takes tens of minutes on a CPU.

    Examples:
      surgery pretrain recipes/tiny-mamba2.yaml --out runs/tiny-mamba2
    """
    from surgery.pretraining import pretrain as pretraining
    from surgery.records.pretrain_recipe import read_pretrain_recipe

    options = read_pretrain_recipe(recipe)
    pretraining.check_place(out)
    check_writable(out.parent)
    for name, value in pretraining.pretrain(options, out).items():
        show(f"{name}: {value}")
