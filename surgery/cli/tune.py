"""surgery tune"""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from surgery.cli.console import show, table
from surgery.cli.options import HybridArgument, OutRequired, RecipeOption, Resume, Settings, Trust, check_writable, recipe_of

if TYPE_CHECKING:
    from surgery.doctor.rehearsal import Rehearsal


def tune(
    hybrid: HybridArgument, out: OutRequired, recipe: RecipeOption = None, settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is trained and what it costs; write nothing.")] = False,
    base: Annotated[str | None, typer.Option("--base", help="Its base, if not where the hybrid says.")] = None,
    resume: Resume = False, trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Tune a hybrid's grafts: a tuned hybrid folder. Checkpoints lie in <out>-tuning. Processes started by `accelerate launch`
    divide every batch, and with FSDP (version 2) also the model."""
    from surgery.doctor.rehearsal import rehearse
    from surgery.exporting.export import export
    from surgery.exporting.source import base_of, check_base_is_here, holds_base, is_patch
    from surgery.jobs.opening import in_dtype_of, open_checkpoint
    from surgery.loading.checkpoint import plan_of
    from surgery.runtime.processes import on_main
    from surgery.splicing.splice import adopt, check_base
    from surgery.tuning import batches, loop
    from surgery.tuning.lora import matches
    from surgery.tuning.shards import divided
    from surgery.tuning.trackers import check_trackers

    options = recipe_of("tune", recipe, settings, model=hybrid)
    check_trackers(options.tune)
    plan = plan_of(hybrid)
    # A whole model may be too large for one device.
    placed = options.model_copy(update={"device": "cpu"}) if divided() else options
    loaded = open_checkpoint(placed, trust_remote_code, base if is_patch(hybrid) else None)
    batches.check(loaded.tokenizer, options.tune, options.data, options.bench, options.seed)
    if options.tune.lora is not None:
        matches(loaded.model, options.tune.lora)
    base_name = base_of(hybrid) if base is None else base
    teacher = None
    if not holds_base(hybrid):
        opened = in_dtype_of(plan, placed.model_copy(update={"model": check_base_is_here(base_name, hybrid)}))
        original = open_checkpoint(opened, trust_remote_code)
        if opened.dtype == plan.dtype:
            check_base(plan, original.fingerprint)
        teacher = adopt(original.model)
    if dry_run:
        _show_rehearsal(rehearse(
            loaded.model, loaded.tokenizer, options.tune, data=options.data, seed=options.seed, teacher=teacher
        ))  # fmt: skip
        return
    work = out.with_name(f"{out.name}-tuning")
    on_main(partial(check_writable, work))
    log = loop.tune(
        loaded.model,
        loaded.tokenizer,
        options.tune,
        data=options.data,
        seed=options.seed,
        teacher=teacher,
        out=work,
        resume=resume,
    )
    on_main(partial(export, loaded.model, out, tokenizer=loaded.tokenizer, plan=plan, base=base_name, recipe=options))
    for stage in dict.fromkeys(record["stage"] for record in log):
        records = [record for record in log if record["stage"] == stage]
        what = "retrieval" if "retrieval" in records[0] else "loss"
        show(f"{stage}: {what} {records[0][what]:.3f} -> {records[-1][what]:.3f}")
    show(f"hybrid: {out}")


def _show_rehearsal(rehearsal: "Rehearsal") -> None:
    table(*rehearsal.tensor_rows())
    show(f"{rehearsal.numbers():,} numbers in {len(rehearsal.trained)} tensors would be trained.")
    table(*rehearsal.cost_rows())
    show(
        "Measured here: the time of a step, and the memory that it takes beyond the weights. Computed from sizes: weights, "
        "gradients and optimizer; activations are what remains. The stages before the steps, and early stopping, come on top."
    )
    if rehearsal.padding is not None:
        show(f"Padding: {rehearsal.padding:.1%} of the text.")
    show("Nothing was written.")
