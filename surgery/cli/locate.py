"""surgery locate"""

from pathlib import Path

from surgery.cli.options import ModelArgument, OutFile, Overwrite, RecipeOption, Settings, Trust, open_model
from surgery.records.recipe import read_recipe
from surgery.runtime.files import check_output_file
from surgery.runtime.progress import show


def locate(
    model: ModelArgument,
    out: OutFile = Path("ranking.json"),
    recipe: RecipeOption = None,
    settings: Settings = [],  # noqa: B006
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Rank the heads, and name those that gather and those that aggregate.

    Examples:
      surgery locate checkpoints/tiny-mamba2 --out runs/mine/ranking.json
      surgery locate MODEL --set locate.examples=64 --set locate.exact=0.1 --out ranking.json
    """
    options = read_recipe(recipe, settings, model=model)
    check_output_file(out, [model, *([recipe] if recipe else [])], overwrite=overwrite, marks=("heads", "probe"))
    from surgery.models.digests import fingerprint
    from surgery.pipeline import locate_heads

    base, tokenizer = open_model(model, options, trust_remote_code)
    ranking = locate_heads(base, tokenizer, options, fingerprint(base))
    ranking.write(out)
    show(f"{'head':14}{'attribution':>12}{'gain':>9}  role")
    for each in ranking.heads[:10]:
        gain = "-" if each.gain is None else f"{each.gain.mean:+.3f}"
        show(f"{each.name:14}{each.slope:+12.3f}{gain:>9}  {each.roles.role if each.roles else '-'}")
    show("attribution: fall of the loss as attention opens at the head, nats a question; gain: measured, attention untrained")
    show(ranking.circuit.sentence if ranking.circuit else "")
    show(f"Ranking: {out}")
