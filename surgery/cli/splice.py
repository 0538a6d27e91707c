"""surgery splice"""

from typing import Annotated

import typer

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
from surgery.exporting.verifications import check_way


def splice(
    model: ModelArgument,
    plan: PlaceArgument,
    out: OutRequired,
    recipe: RecipeOption = None,
    settings: Settings = None,
    verify: Verify = "auto",
    overwrite: ReplaceExport = False,
    state_size: Annotated[
        int | None, typer.Option("--state-size", help="Keep this many dimensions of the state, those that text needs most.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Put a plan's grafts into a model, and give its attention the plan's windows.

    Writes a hybrid folder, untrained. With --state-size the heads that stay an SSM keep a part of their state
    (plan.state_size does the same while planning); tune the hybrid afterwards.

    Examples:
      surgery splice checkpoints/tiny-mamba2 plan.json --out spliced
      surgery splice checkpoints/tiny-mamba2 plan.json --out s --state-size 4
    """
    options = recipe_of("splice", recipe, settings, model=model)
    from surgery.commands.hybrid_folder import advise_tuning
    from surgery.exporting.export import export
    from surgery.jobs.opening import as_ranked, open_base, open_donor
    from surgery.records.plan import Plan
    from surgery.runtime.ownership.files import check_free
    from surgery.splicing import splice as splicing

    check_way(verify)
    check_free(out, overwrite=overwrite)
    chosen = Plan.read(plan)
    base = open_base(as_ranked(chosen.provenance, options), trust_remote_code, kind=chosen.kind)
    splicing.check_base(chosen, base.fingerprint)
    donor = open_donor(chosen, trust_remote_code)
    if state_size is not None:
        from surgery.tuning import state_sizes

        tokens = options.tune.text_tokens
        chosen = state_sizes.shrink_state(
            base, chosen, state_size, donor=donor, data=options.data, text_tokens=tokens, seed=options.seed
        )
    hybrid = splicing.splice(base.model, chosen, donor)
    export(hybrid, out, tokenizer=base.tokenizer, plan=chosen, base=base.name, verify=verify)
    show(f"hybrid: {out}")
    advise_tuning(str(out))
