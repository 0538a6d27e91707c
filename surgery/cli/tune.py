"""surgery tune"""

from typing import TYPE_CHECKING, Annotated

import typer

from surgery.cli.console import prose, show, starting, table
from surgery.cli.options import (
    HybridArgument,
    OutRequired,
    Overwrite,
    RecipeOption,
    Resume,
    Settings,
    Trust,
    Verify,
    recipe_of,
)
from surgery.exporting.verifications import check_way
from surgery.records.reading import check_name

if TYPE_CHECKING:
    from surgery.costs.rehearsal import TuningProfile


def tune(
    hybrid: HybridArgument, out: OutRequired, recipe: RecipeOption = None, settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is trained and what it costs; write nothing.")] = False,
    base: Annotated[
        str | None, typer.Option("--base", help="Its base, if not where the hybrid says.", callback=check_name)
    ] = None,
    verify: Verify = "auto", resume: Resume = False, overwrite: Overwrite = False, trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Train a hybrid's grafts.

    Writes a tuned hybrid folder; checkpoints lie in <out>-tuning. Processes started by `accelerate launch` divide every batch,
    and with FSDP (version 2) or DeepSpeed's ZeRO 3 also the model.

    Examples:
      surgery tune spliced --out tuned --dry-run
      surgery tune spliced --out tuned --set tune.steps=100
    """
    check_way(verify)
    options = recipe_of("tune", recipe, settings, model=hybrid)
    with starting():
        from surgery.commands.tune_hybrid import tune_hybrid
    log = tune_hybrid(
        options,
        out,
        base=base,
        dry_run=dry_run,
        verify=verify,
        resume=resume,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
    )
    if not isinstance(log, list):
        _show_rehearsal(log)
        return
    # Without lessons there is no loss on them, and without hits and hints none on those.
    losses = [name for name in ("retrieval", "hits", "hints") if any(record.get(name) for record in log)]
    for what in losses or ["loss"]:
        prose(_course(what, [record[what] for record in log]))
    show(f"hybrid: {out}")


def _course(what: str, losses: list[float]) -> str:
    """How tuning began and ended. The loss of a step says little, as questions are easy or hard by the batch: means of the
    first and the last fifth of the steps are compared."""
    steps = max(1, len(losses) // 5)
    first, last = sum(losses[:steps]) / steps, sum(losses[-steps:]) / steps
    meant = f" (means of the first and the last {steps} steps)" if steps > 1 else ""
    return f"{what} {first:.3f} -> {last:.3f}{meant}"


def _show_rehearsal(rehearsal: "TuningProfile") -> None:
    table(*rehearsal.tensor_rows())
    show(f"{rehearsal.numbers():,} numbers in {len(rehearsal.trained)} tensors would be trained.")
    table(*rehearsal.cost_rows())
    prose(
        "Measured here: the time of a step, and the memory that it takes beyond the weights. Computed from sizes: weights, "
        "gradients and optimizer; activations are what remains. Early stopping comes on top."
    )
    if rehearsal.padding is not None:
        show(f"Padding: {rehearsal.padding:.1%} of the text.")
    show("Nothing was written.")
