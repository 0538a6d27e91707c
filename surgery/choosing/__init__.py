"""Ways of choosing heads (`plan.by`), one file each, found by listing this folder: a new way is a new file.

The first paragraph of the file says how it chooses (`surgery list ways` prints it). What else a file holds, the protocol Way
says. All of them stay within the bounds of plan.auto (bounded.py), and differ in the heads that they propose."""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Protocol

from surgery.errors import UserError
from surgery.records.complaints import none_named

if TYPE_CHECKING:
    from surgery.choosing.task import ChoiceTask, Most
    from surgery.records.plan import Plan
    from surgery.records.recipe import PlanOptions

SHARED = ("bounded", "passes", "task", "windows")  # what the ways use, and what is no way of choosing grafts


class Way(Protocol):
    """A module of this folder."""

    def choose(self, task: "ChoiceTask") -> "Plan":
        """Raises UserError where it has nothing to propose, NoPlan where no plan is within the bounds."""

    def most(self, options: "PlanOptions", heads: int, bounded: bool) -> "Most":
        """What it measures at most in a model of so many heads. bounded: whether the base's other skills bound the plans."""


def names() -> list[str]:
    """Of all ways; the default comes first."""
    known = (module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED)
    return sorted(known, key=lambda name: (name != "gain", name))


def check_way(name: str) -> None:
    """Raise UserError for what is not a way."""
    if name not in names():
        raise UserError(f"plan.by: {none_named('way of choosing', name, dict.fromkeys(names()))}")


def way_of(name: str) -> Way:
    """Raises UserError if there is none of that name."""
    check_way(name)
    way: Way = importlib.import_module(f"{__name__}.{name}")
    return way
