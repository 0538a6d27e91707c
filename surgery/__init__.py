"""Hybrid model surgery: find the retrieval heads of a pretrained Mamba and splice attention in their place.

    base = surgery.load("checkpoints/tiny-mamba2")
    ranking = surgery.locate(base.model, base.tokenizer)
    plan = surgery.plan(ranking, heads=1)
    hybrid = surgery.splice(base.model, plan)
    surgery.tune(hybrid, base.tokenizer)
    surgery.bench({"base": base.model, "hybrid": hybrid}, base.tokenizer)
    surgery.export(hybrid, "hybrid", tokenizer=base.tokenizer, plan=plan, base=base.name)

Importing the package also makes `AutoModelForCausalLM` load hybrids.
"""

import surgery.families
import surgery.runtime.quiet
from surgery.errors import UserError
from surgery.evaluation.bench import bench
from surgery.evaluation.report import Report
from surgery.exporting.export import export
from surgery.jobs.run import run
from surgery.loading.checkpoint import Checkpoint, load
from surgery.locating.locate import locate
from surgery.locating.planning import plan
from surgery.locating.ranking import Ranking
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, Tune, read_recipe
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice, unsplice
from surgery.tuning.loop import tune

surgery.families.families()  # registers the hybrid classes with transformers

__all__ = [
    "Checkpoint",
    "Plan",
    "Ranking",
    "Recipe",
    "Report",
    "Site",
    "Tune",
    "UserError",
    "adopt",
    "bench",
    "export",
    "load",
    "locate",
    "plan",
    "read_recipe",
    "run",
    "splice",
    "tune",
    "unsplice",
]
