"""surgery pretrain"""

from pathlib import Path

from surgery.cli.console import show
from surgery.cli.options import OutRequired, check_writable


def pretrain(recipe: Path, out: OutRequired) -> None:
    """Train a built-in reference model on the small world, from scratch (tens of minutes on a CPU)."""
    from surgery.pretraining import pretrain as pretraining
    from surgery.pretraining.pretrain_recipe import read_pretrain_recipe

    check_writable(out.parent)
    for name, value in pretraining.pretrain(read_pretrain_recipe(recipe), out).items():
        show(f"{name}: {value}")
