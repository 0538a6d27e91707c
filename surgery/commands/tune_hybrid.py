"""Tunes a hybrid's folder into another one, as `surgery tune` does."""

from functools import partial
from pathlib import Path

from surgery.commands.hybrid_folder import holds_base, present
from surgery.costs.rehearsal import TuningProfile, rehearse
from surgery.errors import UserError
from surgery.exporting.export import check_space, export
from surgery.exporting.folder import RECORD as EXPORT
from surgery.exporting.folder import Exported
from surgery.exporting.source import base_of, is_patch
from surgery.exporting.verifications import check_way
from surgery.jobs.opening import as_ranked, open_checkpoint
from surgery.jobs.output_folder import begin, check_folder, is_empty, withdrawn_if_refused
from surgery.jobs.preparing import check_tuning, name_texts
from surgery.jobs.stages import first_change
from surgery.jobs.tuning_stage import steps_of, tuned
from surgery.loading.digests import model_digest
from surgery.records.recipe import Recipe
from surgery.runtime.ownership.files import check_free
from surgery.runtime.processes import on_main
from surgery.runtime.progress import busy, say
from surgery.splicing.load import plan_of
from surgery.splicing.splice import adopt, check_base
from surgery.tuning import batches
from surgery.tuning.lora import matches
from surgery.tuning.shards import divided
from surgery.tuning.state import Log
from surgery.tuning.trackers import check_trackers


@withdrawn_if_refused
def tune_hybrid(
    recipe: Recipe,
    out: Path,
    *,
    base: str | None = None,
    dry_run: bool = False,
    verify: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Log | TuningProfile:
    """Tune the recipe's model, a hybrid, and export it to `out`; checkpoints lie in <out>-tuning. Returns the log, or with
    `dry_run`, which writes nothing, what would be trained and what it costs.

    base: where the hybrid's base is, if not where the hybrid says. verify: how the export is, as export() takes it. resume: go
    on with an earlier tuning into `out`, if it is of the same hybrid and settings; else tune anew. overwrite: remove what it
    has left, and replace the hybrid in `out`. Raises UserError, and writes nothing, where one is there and neither is given, or
    where the disk has no room for the export. What was tuned is kept if the export fails.
    """
    hybrid, work = recipe.model, out.parent / f"{out.name}-tuning"
    if not dry_run:
        on_main(partial(_check_folders, out, work, resume=resume, overwrite=overwrite))
    check_way(verify)
    check_trackers(recipe.tune)
    plan = plan_of(hybrid)
    # A whole model may be too large for one device.
    placed = recipe.model_copy(update={"device": "cpu"}) if divided() else recipe
    base_name = base_of(hybrid) if base is None else base
    with busy("opening the models"):
        loaded = open_checkpoint(placed, trust_remote_code, base if is_patch(hybrid) else None)
        check_tuning(recipe.tune, loaded.model)
        batches.check(loaded.tokenizer, recipe.tune, recipe.data, recipe.bench, recipe.seed)
        if recipe.tune.lora is not None:
            matches(loaded.model, recipe.tune.lora)
        teacher = None
        if not holds_base(hybrid):
            # The base's folder may hold no tokenizer; the hybrid's does.
            words = placed.tokenizer or hybrid
            opened = placed.model_copy(update={"model": present(base_name, hybrid), "tokenizer": words})
            opened = as_ranked(plan.provenance, opened)
            # Of processes that each hold a part of the model, none may hold a part of what another model uses.
            original = open_checkpoint(opened, trust_remote_code, beside=None if divided() else loaded)
            if opened.dtype == plan.dtype:
                check_base(plan, original.fingerprint)
            teacher = adopt(original.model)
    if dry_run:
        return rehearse(loaded.model, loaded.tokenizer, recipe.tune, data=recipe.data, seed=recipe.seed, teacher=teacher)
    if not (resume and (out / EXPORT).exists()):  # which may be the result; if not, its export looks again
        on_main(partial(check_space, "hf", loaded.model, out))
    earlier = begin(work, "tune", recipe, resume=resume, overwrite=overwrite)
    if earlier and (change := first_change(earlier, recipe, ("tune",))) is not None:
        say(str(change))
    options = recipe.tune
    name_texts(recipe, loaded.tokenizer, measures=False)
    say(f"tuning: {steps_of(options)} of {options.batch_size} sequences and {options.text_batch_size} texts")
    log = tuned(loaded.model, loaded, recipe, work, plan=plan, teacher=teacher, resume=resume)
    if resume and on_main(partial(_holds, out, model_digest(loaded.model))):
        say(f"nothing has changed, and everything is finished: {out} holds the tuned hybrid")
        return log

    def write() -> None:
        try:
            export(
                loaded.model, out, tokenizer=loaded.tokenizer, plan=plan, base=base_name, recipe=recipe, verify=verify,
            )  # fmt: skip
        except UserError as error:  # the tuning is not lost
            raise UserError(
                f"{error} (what was tuned is kept in {work}: the same command with --resume goes on from there)"
            ) from error

    with busy("exporting, and comparing the reloaded model with the live one"):
        on_main(write)
    return log


def _check_folders(out: Path, work: Path, *, resume: bool, overwrite: bool) -> None:
    """Both the hybrid's folder and that of the checkpoints may be written."""
    check_free(out)  # now, and not after hours of tuning
    check_folder(work, "tune", resume=resume, overwrite=overwrite)
    if is_empty(out) or overwrite:
        return
    if not (resume and not is_empty(work)):
        ways = "--overwrite replaces it" if is_empty(work) else "--resume goes on with its tuning, --overwrite replaces it"
        raise UserError(f"{out} exists: {ways} (or choose another --out)")


def _holds(out: Path, digest: str) -> bool:
    """Whether a folder is the export of a model."""
    try:
        return (out / EXPORT).exists() and Exported.read(out / EXPORT, unsealed="refuse").digest == digest
    except UserError:
        return False
