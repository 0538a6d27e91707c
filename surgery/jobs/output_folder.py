"""The output folder of a verb that keeps a run. What an earlier run left in it is never overwritten unasked: --resume goes on
with it, --overwrite removes it first. What is not ours (runtime/ownership) stays in either case, and is named where it is in
the way."""

import os
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import yaml

from surgery.errors import UserError
from surgery.evaluation import views
from surgery.jobs.interruption import note_beginning
from surgery.records.plan import PLAN
from surgery.records.recipe import Recipe, read_recipe
from surgery.records.record import Record, toolkit, write_text
from surgery.runtime.ownership import files
from surgery.runtime.ownership.complaints import refuse, saying
from surgery.runtime.ownership.files import check_free, enter, withdraw
from surgery.runtime.ownership.folder import OwnedFolder
from surgery.runtime.ownership.replacing import sweep
from surgery.runtime.ownership.steps import real
from surgery.runtime.processes import is_main, on_main

RECIPE, RUN = "recipe.yaml", "run.json"
CHOSEN, LOOK = "chosen.yaml", "look.json"  # of a run that chose its recipe by looking at the model
# What is written before anything is measured or trained.
BEFOREHAND = {RECIPE, RUN, CHOSEN, LOOK, "tuning.json"}
# Names that a verb will need in its folder: if one of them is the user's, the verb ends before the work.
LOCATE, BENCH = ("ranking.json", "locate"), ("report.json", "report.md", "cells")
NEEDED = {
    "locate": LOCATE,
    "bench": (*BENCH, "tuning"),
    "prune": ("pruning.json",),
    "tune": ("tuning.json", "adapter", "lora.txt"),
    "run": (
        *LOCATE,
        *BENCH,
        PLAN,
        CHOSEN,
        LOOK,
        "planning",
        "tuning",
        "hybrid",
        "findings.json",
        "figure.png",
        "frontier.json",
        "bases",
        "jobs",
    ),
}
# The moments of evaluation/views.py that a verb comes to.
DRAWN = {
    "locate": ("located",),
    "bench": ("measured", "described"),
    "run": ("located", "refused", "measured", "described"),
}  # fmt: skip
P = ParamSpec("P")
T = TypeVar("T")


class Run(Record):
    """run.json: that a folder belongs to a verb of this toolkit."""

    schema_version: int = 1
    toolkit: str
    verb: str


def check_folder(out: Path, verb: str, *, resume: bool = False, overwrite: bool = False, resumable: bool = True) -> None:
    """See that `verb` may write into `out`. Cheap: called before anything is loaded.

    Raises UserError for a folder of something else, for one that holds an earlier run where neither `resume` nor `overwrite` is
    given, where it is to be resumed by another verb, and where a file of the user's is in the way.
    """
    if resume and overwrite:
        raise UserError("--resume goes on with the earlier run and --overwrite removes it: give one of them")
    drawn = _drawn(verb)
    if is_empty(out):
        return
    with saying(out):
        folder = OwnedFolder.of(real(out))
        if folder is None or RUN not in folder.files:
            raise UserError(f"{out} exists and is no earlier run of this toolkit; choose another --out")
        names = {path: path.relative_to(folder.root).as_posix() for path in folder.survey().foreign}
    refuse(path for path, name in names.items() if name in folder.files or name in (RECIPE, RUN, *NEEDED[verb], *drawn))
    if verb == "run":
        check_free(out / "hybrid")
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


def _drawn(verb: str) -> list[str]:
    """The names of the files that views will write. Raises UserError for those that the toolkit writes."""
    moments, ours = DRAWN.get(verb, ()), {RECIPE, RUN, *(name for names in NEEDED.values() for name in names)}
    names = {name: view for view, of_view in views.files().items() for moment in moments for name in of_view.get(moment, ())}
    if taken := sorted(names.keys() & ours):
        raise UserError(f"the view {names[taken[0]]} writes {taken[0]}, which is not a picture's name; choose another one")
    return list(names)


def begin(
    out: Path, verb: str, recipe: Recipe, *, resume: bool = False, overwrite: bool = False, resumable: bool = True
) -> Recipe | None:
    """Make the folder ready once all inputs are known to be good, and return the recipe of the run that is resumed (None: there
    is none, or it cannot be read any more). Until the job ends, what is written there goes into the folder's record. Every
    process calls it. Raises UserError as check_folder does."""
    earlier = on_main(
        partial(_begin, out, verb, recipe, resume=resume, overwrite=overwrite, resumable=resumable),
    )
    if not is_main():
        enter(out)
    return earlier


def _begin(out: Path, verb: str, recipe: Recipe, *, resume: bool, overwrite: bool, resumable: bool) -> Recipe | None:
    check_folder(out, verb, resume=resume, overwrite=overwrite, resumable=resumable)
    earlier = _earlier(out / RECIPE) if resume else None
    empty = is_empty(out)
    folder = enter(out)
    if empty and folder.created is None:  # but for what a killed writer has left
        folder.created = []
    with saying(out):
        sweep(folder)
        if overwrite:
            clear(folder)
    note_beginning()
    Run(toolkit=toolkit(), verb=verb).write(out / RUN)
    write_text(out / RECIPE, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    return earlier


def withdrawn_if_refused(job: Callable[P, T]) -> Callable[P, T]:
    """A job that leaves nothing in its folder if it fails before anything was measured or trained: that a model's states
    overflow shows in its first forward pass alone, when the folder is ready. An interrupted job is not refused."""

    @wraps(job)
    def whole(*arguments: P.args, **options: P.kwargs) -> T:
        with files.job() as folders:
            try:
                return job(*arguments, **options)
            except Exception:
                withdraw(folders, BEFOREHAND)
                raise

    return whole


def is_empty(out: Path) -> bool:
    """Whether there is nothing at a place, but for what a killed writer has left. Raises UserError for what is no folder."""
    if not os.path.lexists(out):
        return True
    if not out.is_dir():
        raise UserError(f"cannot write {out}: it is no folder")
    with saying(out):
        folder = OwnedFolder.of(real(out))
        if folder is None:
            return not any(out.iterdir())
        return RUN not in folder.files and not any(not folder.left(path) for path in folder.survey().all())


def clear(folder: OwnedFolder) -> None:
    """Remove what the run in a folder has left there, and nothing else: a hybrid may lie in the folder of the ranking by which
    it was planned. What says that it is a run goes last: a process that is killed leaves what can be removed, or resumed."""
    last = (folder.root / RECIPE, folder.root / RUN)
    for path in sorted(folder.root.iterdir()):
        if path not in last:
            folder.tidy(path)
    for path in last:
        folder.tidy(path)


def _earlier(path: Path) -> Recipe | None:
    try:
        return read_recipe(path) if path.exists() else None
    except UserError:  # of another version, which the stages find out by themselves
        return None
