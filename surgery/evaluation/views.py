"""Views: pictures and pages that show results to a reader. They are found by listing the folders `views` around the core; all
that they show is in JSON and Markdown without them.

A view is a file with a function for each of the moments below at which it has something to draw. It takes what the function
here takes, and writes into the folder `out`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgery.evaluation.entries import Entry
from surgery.evaluation.report import Report
from surgery.loading.opened import Checkpoint
from surgery.locating.ranking import Ranking
from surgery.records.growth import Growth
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.runtime.listing import listed


@dataclass(frozen=True)
class MeasuredModels:
    """entries: the models, by their names in the report."""

    report: Report
    base: Checkpoint
    entries: Mapping[str, Entry]
    recipe: Recipe


def located(base: Checkpoint, ranking: Ranking, out: Path) -> None:
    """The heads of a base are ranked."""
    _draw("located", base, ranking, out)


def refused(growth: Growth, out: Path) -> None:
    """No plan that was measured is within its bounds."""
    _draw("refused", growth, out)


def measured(what: MeasuredModels, out: Path) -> None:
    """Models are measured. out: has the ranking, if heads were ranked for it."""
    _draw("measured", what, out)


def described(report: Report, out: Path) -> None:
    """The report is written, for the first time or again with the times of later stages. What `measured` drew is there."""
    _draw("described", report, out)


def exported(hybrid: PreTrainedModel, plan: Plan | None, report: Report | None, out: Path) -> None:
    """A hybrid is written, with its plan and the report on it, if there are any."""
    _draw("exported", hybrid, plan, report, out)


def _draw(moment: str, *given: Any) -> None:
    for module in listed("views").values():
        if (draw := getattr(import_module(module), moment, None)) is not None:
            draw(*given)
