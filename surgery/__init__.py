"""Finds the retrieval heads of a pretrained state-space model, and adds gated attention there.

Importing this package imports no torch: a name is loaded when it is first used. `import surgery.modeling` makes transformers
know the hybrids' classes, so that `AutoModelForCausalLM.from_pretrained(FOLDER)` needs no `trust_remote_code`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from surgery.errors import UserError

if TYPE_CHECKING:
    from surgery.checking.check import check
    from surgery.evaluation.bench import bench
    from surgery.exporting.export import export
    from surgery.locating.locate import locate
    from surgery.look import look
    from surgery.models.load import load
    from surgery.pipeline import run
    from surgery.planning.choose import choose
    from surgery.records.plan import Plan
    from surgery.records.ranking import Ranking
    from surgery.records.recipe import Bench, Data, Locate, PlanOptions, Recipe, Tune, read_recipe
    from surgery.records.site import Site
    from surgery.splicing.splice import splice, unsplice
    from surgery.tuning.loop import tune

_PLACES = {
    "check": "checking.check",
    "bench": "evaluation.bench",
    "export": "exporting.export",
    "locate": "locating.locate",
    "look": "look",
    "load": "models.load",
    "run": "pipeline",
    "choose": "planning.choose",
    "Plan": "records.plan",
    "Ranking": "records.ranking",
    **dict.fromkeys(("Bench", "Data", "Locate", "PlanOptions", "Recipe", "Tune", "read_recipe"), "records.recipe"),
    "Site": "records.site",
    **dict.fromkeys(("splice", "unsplice"), "splicing.splice"),
    "tune": "tuning.loop",
}

__all__ = [
    "Bench",
    "Data",
    "Locate",
    "Plan",
    "PlanOptions",
    "Ranking",
    "Recipe",
    "Site",
    "Tune",
    "UserError",
    "bench",
    "check",
    "choose",
    "export",
    "load",
    "locate",
    "look",
    "read_recipe",
    "run",
    "splice",
    "tune",
    "unsplice",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'surgery' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"surgery.{_PLACES[name]}"), name)
    globals()[name] = value  # also where a submodule has the same name: surgery.look is the function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
