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
import surgery.quiet
from surgery.bench import Report, bench
from surgery.checkpoint import Checkpoint, load
from surgery.errors import UserError
from surgery.export import export
from surgery.locate import Ranking, locate, plan
from surgery.plan import Plan
from surgery.recipe import Recipe, read_recipe
from surgery.run import run
from surgery.site import Site
from surgery.splice import adopt, splice, unsplice
from surgery.tune import tune

surgery.families.families()  # registers the hybrid classes with transformers

__all__ = [
    "Checkpoint",
    "Plan",
    "Ranking",
    "Recipe",
    "Report",
    "Site",
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
