"""The output folder of a verb. What an earlier run left in it is never overwritten unasked: --resume goes on with it,
--overwrite removes it first."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import yaml

from surgery.errors import UserError
from surgery.exporting.earlier import RECORD as EXPORT
from surgery.exporting.earlier import check_replaceable
from surgery.jobs.interruption import note_beginning
from surgery.records.plan import PLAN
from surgery.records.recipe import Recipe, read_back
from surgery.records.record import Record, toolkit, write_text
from surgery.runtime.replacing import is_hidden, recover, remove, sweep

RECIPE, RUN = "recipe.yaml", "run.json"
# What a verb leaves in its folder, so that --overwrite removes nothing else. (exporting/ removes its own leftovers.)
COMMON = (RECIPE, RUN)  # in this order
# What is written before anything is measured or trained.
BEFOREHAND = (*COMMON, "tuning.json")
LOCATE = ("ranking.json", "ranking.safetensors", "atlas.png", "mixing.png", "locate")
BENCH = (
    "report.json", "report.md", "report.html", "mixing.json", "grafts.png", "retrieval.png", "lengths.png", "hits.png",
    "cost.png", "speed.png", "dose.png", "cells",
)  # fmt: skip
LEFT = {
    "locate": LOCATE,
    "bench": BENCH,
    "prune": ("pruning.json",),
    "tune": ("checkpoint-*", ".checkpoint-*", "tuning.json", "adapter", "lora.txt"),
    "run": (*LOCATE, *BENCH, PLAN, "planning", "tuning", "hybrid", "findings.json", "figure.png", "seed-*", "bases", "jobs"),
}
P = ParamSpec("P")
T = TypeVar("T")
# Of the job that runs: a folder that was empty when it began -> which folders of its path were not there.
_new: dict[Path, list[Path]] = {}


class Run(Record):
    """run.json: that a folder belongs to a verb of this toolkit. Versions up to 0.6 wrote none."""

    schema_version: int = 1
    toolkit: str
    verb: str


def check_folder(out: Path, verb: str, *, resume: bool = False, overwrite: bool = False, resumable: bool = True) -> None:
    """See that `verb` may write into `out`. Cheap: called before anything is loaded.

    Raises UserError for a folder of something else, for one that holds an earlier run where neither `resume` nor `overwrite` is
    given, and where it is to be resumed by another verb.
    """
    if resume and overwrite:
        raise UserError("--resume goes on with the earlier run and --overwrite removes it: give one of them")
    if is_empty(out):
        return
    if not holds_run(out):
        raise UserError(f"{out} exists and is no earlier run of this toolkit; choose another --out")
    if verb == "run":
        check_replaceable(out / "hybrid")
    if overwrite:
        return
    if (out / RUN).exists() and (earlier := Run.read(out / RUN).verb) != verb:
        cannot = f", which `surgery {verb}` cannot resume" if resume else ""
        raise UserError(
            f"{out} holds an earlier run of `surgery {earlier}`{cannot}: --overwrite removes it (or choose another --out)"
        )
    if not resume:
        ways = "--resume goes on with it, --overwrite replaces it" if resumable else "--overwrite replaces it"
        raise UserError(f"{out} holds an earlier run: {ways} (or choose another --out)")


def begin(
    out: Path, verb: str, recipe: Recipe, *, resume: bool = False, overwrite: bool = False, resumable: bool = True
) -> Recipe | None:
    """Make the folder ready once all inputs are known to be good, and return the recipe of the run that is resumed (None: there
    is none, or it cannot be read any more). Raises UserError as check_folder does."""
    check_folder(out, verb, resume=resume, overwrite=overwrite, resumable=resumable)
    earlier = _earlier(out / RECIPE) if resume else None
    if is_empty(out):
        _new[out] = [path for path in (out, *out.parents) if not path.exists()]
    sweep(out)
    recover(out / "hybrid")
    if overwrite:
        clear(out)
    note_beginning()
    Run(toolkit=toolkit(), verb=verb).write(out / RUN)
    write_text(out / RECIPE, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    return earlier


def withdrawn_if_refused(job: Callable[P, T]) -> Callable[P, T]:
    """A job that leaves nothing in its folder if it fails before anything was measured or trained: that a model's states
    overflow shows in its first forward pass alone, when the folder is ready. An interrupted job is not refused."""

    @wraps(job)
    def whole(*arguments: P.args, **options: P.kwargs) -> T:
        _new.clear()
        try:
            return job(*arguments, **options)
        except Exception:
            for out, created in _new.items():
                _withdraw(out, created)
            raise

    return whole


def _withdraw(out: Path, created: list[Path]) -> None:
    """Remove what begin() has written, and the folders that it created, if nothing else was written."""
    entries = [path for path in out.rglob("*") if not is_hidden(path)]
    files = [path for path in entries if path.is_symlink() or not path.is_dir()]
    if {path.relative_to(out).as_posix() for path in files} <= {*BEFOREHAND}:
        with suppress(OSError):  # of a disk on which nothing can be changed any more
            for path in files:
                path.unlink()
            for folder in (*sorted({*entries} - {*files}, reverse=True), *created):
                folder.rmdir()


def is_empty(out: Path) -> bool:
    """Whether there is nothing at a place, but for what a killed writer has left. Raises UserError for what is no folder."""
    try:
        if out.is_dir():
            return all(map(is_hidden, out.iterdir()))
        if out.exists() or out.is_symlink():
            raise UserError(f"cannot write {out}: it is no folder")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return True


def holds_run(out: Path) -> bool:
    """Whether a folder was written by a verb that keeps a run. A model's folder may hold a recipe too, and is none; nor is a
    folder that holds a recipe alone, which a user may have written."""
    if (out / RUN).exists():
        return True
    if any((out / name).exists() for name in (EXPORT, "config.json")):
        return False
    # Of version 0.6 or earlier.
    results = ("ranking.json", "locate", "tuning", "cells", "report.json", "findings.json")
    return (out / "pruning.json").exists() or ((out / RECIPE).exists() and any((out / name).exists() for name in results))


def clear(out: Path) -> None:
    """Remove what the run in a folder has left there, and nothing else: a hybrid may lie in the folder of the ranking by which
    it was planned."""
    if (out / RUN).exists():
        left = LEFT.get(Run.read(out / RUN).verb, ())
    else:  # of version 0.6 or earlier
        left = LEFT["run"] if (out / PLAN).exists() and (out / "report.json").exists() else (*LOCATE, *BENCH, "pruning.json")
    # What says that the folder is ours goes last: a process that is killed here leaves what can still be removed, or resumed.
    for path in (path for pattern in (*left, *COMMON) for path in out.glob(pattern)):
        try:
            remove(path)
        except OSError as error:
            raise UserError(f"cannot remove {path}: {error.strerror}") from error


def _earlier(path: Path) -> Recipe | None:
    try:
        return read_back(path) if path.exists() else None
    except UserError:  # of another version, which the stages find out by themselves
        return None
