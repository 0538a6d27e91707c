"""Tunes into a folder, and goes on there where a run is resumed, if what is tuned is the same."""

from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgery.jobs.stages import first_difference
from surgery.loading.digests import dtypes, model_digest, tokenizer_digest
from surgery.loading.opened import Checkpoint
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, Tune
from surgery.records.record import Record
from surgery.runtime.ownership.files import remove, writing
from surgery.runtime.processes import on_main
from surgery.runtime.progress import say
from surgery.tuning.loop import tune
from surgery.tuning.state import Log, complete, newest, put_copy, state_of

TUNED, SECONDS = "tuning.json", "seconds.json"  # the second is of studies that compare times


class Tuned(Record):
    """tuning.json: what the checkpoints in a folder were made from.

    model, tokenizer: digests of the base, or of the hybrid as it was before. dtype: of its tensors. plan: sites and start of
    the grafts. layers: of a control, whose mixers are tuned. The rest as in the recipe.
    """

    schema_version: int = 1
    model: str
    tokenizer: str
    dtype: str
    plan: dict[str, Any] | None
    layers: list[int] | None
    seed: int
    kernels: dict[str, str]
    tune: dict[str, Any]
    data: dict[str, Any]


def steps_of(options: Tune) -> str:
    """How many steps there will be, in words."""
    return f"up to {options.max_steps} steps" if options.steps == "auto" else f"{options.steps} steps"


def tuned(
    model: PreTrainedModel, base: Checkpoint, recipe: Recipe, out: Path, *, plan: Plan | None, layers: list[int] | None = None,
    teacher: PreTrainedModel | None = None, resume: bool = False, description: str = "tune", digest: str | None = None,
) -> Log:  # fmt: skip
    """Tune `model` in place as the recipe says, with checkpoints in `out`, and return the log.

    base: what the model was spliced from (of `surgery tune`, the hybrid itself); digest: its model_digest, if it is known. With
    `resume`, a tuning of the same goes on from its last checkpoint; one of anything else begins anew, and a line says so.
    """
    now = record_of(base, recipe, plan, layers, digest)
    with writing(out):
        same = on_main(partial(_prepare, out, now, resume, description))
        return tune(
            model, base.tokenizer, recipe.tune, data=recipe.data, seed=recipe.seed, layers=layers, teacher=teacher, out=out,
            resume=same, description=description,
        )  # fmt: skip


def record_of(
    base: Checkpoint, recipe: Recipe, plan: Plan | None, layers: list[int] | None = None, digest: str | None = None
) -> Tuned:  # fmt: skip
    """What a tuning depends on. Arguments as for tuned()."""
    return Tuned(
        model=digest or model_digest(base.model), tokenizer=tokenizer_digest(base.tokenizer), dtype=dtypes(base.model),
        plan=None if plan is None else plan.model_dump(mode="json", exclude={"provenance", "growth"}), layers=layers,
        seed=recipe.seed, kernels=recipe.kernels, tune=recipe.tune.model_dump(mode="json"),
        data=recipe.data.model_dump(mode="json"),
    )  # fmt: skip


def take_over(earlier: Path, out: Path, now: Tuned) -> bool:
    """Whether the same was tuned to its end in the folder `earlier`, of another run: then its checkpoint is copied to `out`,
    where tuned() with `resume` has nothing left to do."""
    if not (earlier / TUNED).exists() or Tuned.read(earlier / TUNED) != now:
        return False
    checkpoint, state = newest(earlier), state_of(earlier)
    if checkpoint is None or state is None or not state.done:
        return False
    with writing(out):
        put_copy(checkpoint, out / checkpoint.name)
        now.write(out / TUNED)
    return True


def _prepare(out: Path, now: Tuned, resume: bool, description: str) -> bool:
    """Whether the checkpoints in `out` are of the same tuning. If not, they are removed before its record is written, so that a
    process that is killed here leaves nothing to go on with."""
    if resume and (out / TUNED).exists() and _same(out / TUNED, now, description):
        return True
    for checkpoint in complete(out):
        remove(checkpoint)
    remove(out / SECONDS)
    now.write(out / TUNED)
    return False


def _same(path: Path, now: Tuned, description: str) -> bool:
    earlier, later = Tuned.read(path).model_dump(mode="json"), now.model_dump(mode="json")
    earlier["tune"] = Tune().model_dump(mode="json") | earlier["tune"]  # what older versions did not have
    for name, value in later.items():
        if (difference := first_difference(earlier[name], value, name)) is not None:
            say(f"{path} is of another {difference[0]}: tuning {description} again")
            return False
    return True
