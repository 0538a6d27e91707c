"""Ways of choosing heads (`plan.by`): gain.py, the default, and others, one file each, found by listing the folders `ways`
around the core (surgery/more/ways): a new way is a new file there.

The first paragraph of the file says how it chooses (`surgery list ways` prints it). What else a file holds, the protocol Way
says. All of them stay within the bounds of plan.auto (bounded.py), and differ in the heads that they propose."""

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from surgery.errors import UserError
from surgery.records.complaints import none_named
from surgery.runtime.listing import listed

if TYPE_CHECKING:
    from surgery.choosing.task import ChoiceTask, Most
    from surgery.records.plan import Plan
    from surgery.records.recipe import PlanOptions

DEFAULT = "gain"


class Way(Protocol):
    """gain.py, or a module of a folder `ways`."""

    def choose(self, task: "ChoiceTask") -> "Plan":
        """Raises UserError where it has nothing to propose, NoPlan where no plan is within the bounds."""

    def most(self, options: "PlanOptions", heads: int, bounded: bool) -> "Most":
        """What it measures at most in a model of so many heads. bounded: whether the base's other skills bound the plans."""


def names() -> list[str]:
    """Of all ways; the default comes first."""
    return [DEFAULT, *listed("ways")]


def check_way(name: str) -> None:
    """Raise UserError for what is not a way."""
    if name not in names():
        raise UserError(f"plan.by: {none_named('way of choosing', name, dict.fromkeys(names()))}")


def way_of(name: str) -> Way:
    """Raises UserError if there is none of that name."""
    check_way(name)
    way: Way = import_module(f"{__name__}.{DEFAULT}" if name == DEFAULT else listed("ways")[name])
    return way
