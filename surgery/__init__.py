"""Hybrid model surgery: find the retrieval heads of a pretrained Mamba, and add gated attention there.

    base = surgery.load("checkpoints/tiny-mamba2")
    ranking = surgery.locate(base)
    plan = surgery.plan(ranking, heads=1)
    hybrid = surgery.splice(base, plan)
    surgery.tune(hybrid)
    surgery.bench(base, hybrid)
    surgery.export(hybrid, "hybrid")

Importing the package also makes `AutoModelForCausalLM` load hybrids without `trust_remote_code`. It imports neither torch nor
transformers: what is used is imported when it is used, and hybrids are registered with transformers when its Auto classes are
imported.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from surgery.errors import UserError
from surgery.runtime.importing import after_import
from surgery.runtime.quiet import hush_bitsandbytes

if TYPE_CHECKING:
    from surgery.choosing.gain import grow
    from surgery.commands.look import look
    from surgery.costs.estimate import estimate
    from surgery.costs.run import run
    from surgery.evaluation.bench import bench
    from surgery.evaluation.report import Report
    from surgery.exporting.export import export
    from surgery.loading.opened import Checkpoint
    from surgery.locating.locate import locate
    from surgery.locating.planning import plan
    from surgery.locating.ranking import Ranking
    from surgery.records.plan import Plan
    from surgery.records.recipe import Bench, Data, Locate, Recipe, Tune, read_recipe
    from surgery.records.site import Site
    from surgery.runtime.consent import consenting
    from surgery.splicing.load import load
    from surgery.splicing.splice import adopt, splice, unsplice
    from surgery.tuning.loop import tune
    from surgery.tuning.state_sizes import shrink_state

__all__ = [
    "Bench",
    "Checkpoint",
    "Data",
    "Locate",
    "Plan",
    "Ranking",
    "Recipe",
    "Report",
    "Site",
    "Tune",
    "UserError",
    "adopt",
    "bench",
    "consenting",
    "estimate",
    "export",
    "grow",
    "load",
    "locate",
    "look",
    "plan",
    "read_recipe",
    "run",
    "shrink_state",
    "splice",
    "tune",
    "unsplice",
]

# Where each name is defined; as in the imports above, which only type checkers and editors see.
_MODULES = {
    "Bench": "records.recipe",
    "Data": "records.recipe",
    "Checkpoint": "loading.opened",
    "Locate": "records.recipe",
    "Plan": "records.plan",
    "Ranking": "locating.ranking",
    "Recipe": "records.recipe",
    "Report": "evaluation.report",
    "Site": "records.site",
    "Tune": "records.recipe",
    "adopt": "splicing.splice",
    "bench": "evaluation.bench",
    "consenting": "runtime.consent",
    "estimate": "costs.estimate",
    "export": "exporting.export",
    "grow": "choosing.gain",
    "load": "splicing.load",
    "locate": "locating.locate",
    "look": "commands.look",
    "plan": "locating.planning",
    "read_recipe": "records.recipe",
    "run": "costs.run",
    "shrink_state": "tuning.state_sizes",
    "splice": "splicing.splice",
    "tune": "tuning.loop",
    "unsplice": "splicing.splice",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("mamba-surgery")
    if name in _MODULES:
        value = getattr(import_module(f"surgery.{_MODULES[name]}"), name)
        if not isinstance(value, type):
            from surgery.runtime.keywords import explained

            value = explained(value)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"surgery.{name}") is not None:
        return import_module(f"surgery.{name}")  # `surgery.probes` after `import surgery` alone
    raise AttributeError(f"module 'surgery' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _register_hybrids() -> None:
    from transformers import __version__ as installed

    if tuple(map(int, installed.split(".")[:2])) < (5, 20):
        return  # the environment of a serving engine, which pins an earlier one: surgery.serving needs no hybrids of ours
    from surgery.families import register

    register()
    import_module("surgery.splicing.remembered")  # by which a hybrid that transformers loads recalls its plan and base


hush_bitsandbytes()
after_import("transformers.models.auto.configuration_auto", _register_hybrids)
