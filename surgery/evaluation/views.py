"""Views: what draws pictures, and pages, of results. They are found in the folders named `views`. Without them only
mixing.json and what is drawn are missing.

A view is a module with

- FILES: the names of the files that it writes, by the moment at which it does, written out, because names are reserved before
  anything is imported;
- for each of these moments a function of the same name and arguments as here. It writes into `out`, by write_text of
  records/record.py or put of runtime/ownership/files.py, so that the files are known to be ours. Of several processes only the
  main one calls it.

A view that fails is named in a warning, and ends nothing: what it shows is measured already.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.errors import UserError
from surgery.records.names import one_line
from surgery.runtime.listing import listed, literals
from surgery.runtime.progress import say

if TYPE_CHECKING:  # names of files are asked for before anything is loaded
    from transformers import PreTrainedModel

    from surgery.evaluation.entries import Entry
    from surgery.evaluation.report import Report
    from surgery.loading.opened import Checkpoint
    from surgery.locating.ranking import Ranking
    from surgery.records.growth import Growth
    from surgery.records.plan import Plan
    from surgery.records.recipe import Recipe


@dataclass(frozen=True)
class MeasuredModels:
    """entries: the models, by their names in the report."""

    report: "Report"
    base: "Checkpoint"
    entries: "Mapping[str, Entry]"
    recipe: "Recipe"


def located(base: "Checkpoint", ranking: "Ranking", out: Path) -> None:
    """Heads have been ranked; ranking.json is about to be written."""
    _draw("located", base, ranking, out)


def refused(growth: "Growth", out: Path) -> None:
    """No plan that was measured keeps within the bounds."""
    _draw("refused", growth, out)


def measured(what: MeasuredModels, out: Path) -> None:
    """Models have been measured. `out` holds ranking.json if heads were ranked for them."""
    _draw("measured", what, out)


def described(report: "Report", out: Path) -> None:
    """A report is about to be written, and once more when the times of the export are known. What was drawn when the models
    had been measured is in `out`."""
    _draw("described", report, out)


def exported(hybrid: "PreTrainedModel", plan: "Plan | None", report: "Report | None", out: Path) -> None:
    """A hybrid is being exported (without a plan, a base), before it is verified."""
    _draw("exported", hybrid, plan, report, out)


MOMENTS = tuple(function.__name__ for function in (located, refused, measured, described, exported))


def files() -> dict[str, dict[str, list[str]]]:
    """What each view says of its files, read off its text. Raises UserError for two of one name, and for one that says it in
    another way or names a moment that there is not."""
    found = {name: said["FILES"] for name, said in literals("views", "FILES").items()}
    for name, of_view in found.items():
        if not isinstance(of_view, dict) or not all(isinstance(names, list | tuple) for names in of_view.values()):
            raise UserError(f"the view {name} has to say FILES as {{moment: [name of a file, ...], ...}}")
        if wrong := of_view.keys() - MOMENTS:
            raise UserError(f"the view {name} draws when '{min(wrong, key=str)}'; there are {', '.join(MOMENTS)}")
        if paths := [file for names in of_view.values() for file in names if not _is_name(file)]:
            raise UserError(f"the view {name} has to name files in the folder that it is given, not {paths[0]!r}")
    return found


def _is_name(file: Any) -> bool:
    return isinstance(file, str) and file not in ("", ".", "..") and Path(file).name == file


def _draw(moment: str, *given: Any) -> None:
    modules = listed("views")
    for name, of_view in files().items():
        if moment in of_view:
            try:
                getattr(import_module(modules[name]), moment)(*given)
            except Exception as error:  # also of a full disk, which the next file of the run will not fit on, either
                say(f"warning: the view {name} could not draw: {type(error).__name__}: {one_line(str(error))}")
