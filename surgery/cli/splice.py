"""surgery splice"""

from surgery.cli.console import show
from surgery.cli.options import (
    ModelArgument,
    OutRequired,
    PlaceArgument,
    RecipeOption,
    ReplaceExport,
    Settings,
    Trust,
    Verify,
    recipe_of,
)
from surgery.exporting.formats import check_way


def splice(
    model: ModelArgument,
    plan: PlaceArgument,
    out: OutRequired,
    recipe: RecipeOption = None,
    settings: Settings = None,
    verify: Verify = "auto",
    overwrite: ReplaceExport = False,
    trust_remote_code: Trust = False,
) -> None:
    """Put a plan's grafts into a model.

    Writes a hybrid folder, untrained.

    Examples:
      surgery splice checkpoints/tiny-mamba2 plan.json --out spliced
    """
    from surgery.exporting.earlier import check_replaceable
    from surgery.exporting.export import export
    from surgery.exporting.source import advise_tuning
    from surgery.jobs.opening import in_dtype_of, open_base, open_donor
    from surgery.records.plan import Plan
    from surgery.splicing import splice as splicing

    check_way(verify)
    check_replaceable(out, overwrite)
    chosen = Plan.read(plan)
    base = open_base(in_dtype_of(chosen, recipe_of("splice", recipe, settings, model=model)), trust_remote_code)
    splicing.check_base(chosen, base.fingerprint)
    hybrid = splicing.splice(base.model, chosen, open_donor(chosen, trust_remote_code))
    export(hybrid, out, tokenizer=base.tokenizer, plan=chosen, base=base.name, verify=verify)
    show(f"hybrid: {out}")
    advise_tuning(str(out))
