"""Before a job begins: are its inputs there?"""

from surgery.errors import UserError
from surgery.evaluation import harness
from surgery.evaluation.suites import check_probes, standard
from surgery.loading.checkpoint import Checkpoint
from surgery.locating.questions import check_questions
from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.perplexity import Perplexity
from surgery.records.recipe import Recipe
from surgery.runtime.progress import busy
from surgery.splicing.splice import check_sites
from surgery.tuning import batches


def check(recipe: Recipe, base: Checkpoint) -> None:
    """Find out before the work begins whether its inputs are there. Raises UserError for the first that is not."""
    if recipe.bench.doses and recipe.plan.kind != "head":
        raise UserError(f"bench.doses counts heads, and plan.kind is {recipe.plan.kind}")
    with busy("checking the inputs"):
        if names := standard(recipe.bench):
            harness.load(names, recipe.bench.include_path, recipe.bench.data_path)
        check_probes(recipe.bench, base.tokenizer)
        check_questions(base.tokenizer, recipe.locate, recipe.seed)
        check_sites(base.model, recipe.plan.sites or ())
        Knowledge(recipe.data.facts).questions(1, seed=0)
        Letters(recipe.data.facts).questions(1, seed=0)
        Perplexity(recipe.data.held_out_text, 1, recipe.bench.window).token_windows(base.tokenizer, seed=0)
        batches.check(base.tokenizer, recipe.tune, recipe.data, recipe.bench, recipe.seed)
