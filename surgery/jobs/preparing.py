"""Before a job begins: are its inputs there, and may its output folder be written?"""

from pathlib import Path

import yaml

from surgery.errors import UserError
from surgery.evaluation import harness
from surgery.evaluation.suites import check_probes, standard
from surgery.loading.checkpoint import Checkpoint
from surgery.locating.questions import check_questions
from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.perplexity import Perplexity
from surgery.records.recipe import Recipe
from surgery.records.record import write_text
from surgery.splicing.splice import check_sites
from surgery.tuning import batches

RECIPE = "recipe.yaml"


def check(recipe: Recipe, base: Checkpoint) -> None:
    """Find out before the work begins whether its inputs are there."""
    if recipe.bench.doses and recipe.plan.kind != "head":
        raise UserError(f"bench.doses counts heads, and plan.kind is {recipe.plan.kind}")
    if wanted := standard(recipe.bench):
        harness.load(wanted, recipe.bench.include_path, recipe.bench.data_path)
    check_probes(recipe.bench, base.tokenizer)
    check_questions(base.tokenizer, recipe.locate, recipe.seed)
    check_sites(base.model, recipe.plan.sites or ())
    Knowledge(recipe.data.facts).questions(1, seed=0)
    Letters(recipe.data.facts).questions(1, seed=0)
    Perplexity(recipe.data.held_out_text, 1, recipe.bench.window).token_windows(base.tokenizer, seed=0)
    batches.check(base.tokenizer, recipe.tune, recipe.data, recipe.bench, recipe.seed)


def prepare(out: Path, recipe: Recipe, resume: bool) -> None:
    """Make the output folder, and see that a resumed run is the same run."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    written = out / RECIPE
    if resume and written.exists() and written.read_text() != text:
        raise UserError(f"{out} holds a run of another recipe; run without --resume or choose another --out")
    if not resume and out.exists() and any(out.iterdir()) and not written.exists():
        raise UserError(f"{out} exists and is no earlier run; choose another --out")
    write_text(written, text)
