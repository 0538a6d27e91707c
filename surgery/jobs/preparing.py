"""Before a job begins: are its inputs there, and do its sizes fit into memory?"""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.choosing import check_way
from surgery.choosing.windows import check_length, check_windows
from surgery.errors import UserError
from surgery.evaluation import suites
from surgery.evaluation.bench import invented
from surgery.families import family_of
from surgery.loading.empty import load_empty
from surgery.loading.opened import Checkpoint
from surgery.locating.questions import asked, check_questions
from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.perplexity import TextWindows
from surgery.records.recipe import Bench, Recipe, Tune
from surgery.records.site import Site
from surgery.runtime.memory import capacity, size
from surgery.runtime.processes import state
from surgery.runtime.progress import busy, say
from surgery.splicing.donor import check_donor, layer_start
from surgery.splicing.splice import adopt, check_sites, check_start
from surgery.tuning import batches
from surgery.tuning.state_sizes import check_size
from surgery.tuning.trackers import check_trackers


def check(recipe: Recipe, base: Checkpoint) -> None:
    """Find out before the work begins whether its inputs are there, and a window fits into memory. Raises UserError for the
    first that is not, or does not."""
    check_bench(recipe.bench, base.model)
    with busy("checking the inputs"):
        if long := suites.said_of_long(recipe.bench, base.tokenizer):
            say(long)
        suites.check(recipe.bench)
        suites.check_inputs(recipe.bench, base.tokenizer, recipe.data, recipe.seed)
        check_questions(base.tokenizer, recipe.locate, recipe.seed)
        Knowledge(recipe.data.facts).questions(1, seed=0)
        Letters(recipe.data.facts).questions(1, seed=0)
        TextWindows(recipe.data.held_out_text, 1, recipe.bench.window).token_windows(base.tokenizer, seed=0)
        batches.check(base.tokenizer, recipe.tune, recipe.data, recipe.bench, recipe.seed)


def name_texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, tunes: bool = True, measures: bool = True) -> None:
    """Say which text and facts are used, and of a model that does not know the small world, what to give instead of it."""
    data = recipe.data
    used = {"data.train_text": ", ".join(text.source for text in data.train_text)} if tunes else {}
    used |= {"data.held_out_text": data.held_out_text, "data.facts": data.facts} if measures else {}
    say("text and facts: " + ", ".join(f"{key}={source}" for key, source in used.items()))
    if foreign := invented(data, tokenizer, [key.removeprefix("data.") for key in used]):
        say(
            "note: world is the small invented world of the built-in models, which this one does not know: set "
            f"{', '.join(foreign)} (a text file that it knows; facts: capitals, or a .jsonl file)"
        )


def check_run(recipe: Recipe, base: Checkpoint) -> None:
    """Find out before anything is located whether what comes after it can be done: the plan with this base, its donor, and the
    trackers of tuning. Raises UserError for the first that cannot."""
    check_trackers(recipe.tune)
    check_tuning(recipe.tune, base.model)
    options = recipe.plan
    if options.window is not None:
        check_windows(base.model, options.window)
        _, questions = asked(base.tokenizer, recipe.locate.probe, recipe.locate.options)
        check_length(base.tokenizer, questions(max(2, recipe.plan.auto.examples), recipe.seed), options.window)
    if options.kind == "window":
        if recipe.tune.lora is None:
            raise UserError("plan.kind=window: windows have no weights; adapters are tuned beside them: set tune.lora")
        return
    check_way(options.by)
    family = family_of(base.model.config)
    layers, heads = len(family.graftable(base.model)), family.shape(base.model.config)[1]
    most, leading = (
        (layers * heads, 1 if options.grows else options.counted) if options.kind == "head" else (layers, options.layers)
    )
    if options.sites is None and leading > most:
        raise UserError(f"plan.{options.kind}s: the model has {most} {options.kind}s, and {leading} are to be grafted")
    check_sites(base.model, options.sites or ())
    if options.state_size is not None:
        check_size(adopt(base.model), options.state_size, base.name)
    if options.init is not None:
        first = Site(family.graftable(base.model)[0], (0,))
        check_start(base.model, options.trial() if options.sites else options.trial().model_copy(update={"sites": (first,)}))
    if options.donor is not None:
        _check_donor(recipe, base)


def _check_donor(recipe: Recipe, base: Checkpoint) -> None:
    """Whether the grafts can start from the donor, by its configuration: where the sites are not yet known, at the first."""
    options = recipe.plan
    donor = load_empty(options.donor or "")
    trial = options.trial()
    check_donor(trial, donor)
    for site in trial.sites:
        layer_start(base.model, trial, donor, site.layer)


def check_tuning(options: Tune, model: PreTrainedModel) -> None:
    """Raise UserError where a process's share of a micro-batch of text cannot be held."""
    rows = -(-options.text_batch_size // (options.gradient_accumulation_steps * state().num_processes))
    _check_fits(model, "tune.text_batch_size, tune.text_tokens", rows, options.text_tokens)


def check_bench(options: Bench, model: PreTrainedModel) -> None:
    """Raise UserError where a window of text cannot be held."""
    _check_fits(model, "bench.window", 1, options.window)


def _check_fits(model: PreTrainedModel, names: str, rows: int, tokens: int) -> None:
    """Raise UserError for sizes that cannot fit at all: before anything is allocated, and by the least that they take, the
    states of all tokens that go through the model at once, in one layer. What passes may need more; --dry-run estimates it.
    names: the settings that `rows` and `tokens` come from."""
    embeddings: Any = model.get_input_embeddings()
    least, most = rows * tokens * embeddings.weight.shape[-1] * model.dtype.itemsize, capacity(model.device)
    if least > most:
        raise UserError(
            f"{names}: {rows:,} x {tokens:,} tokens at once have states of {size(least)} in one layer alone, and "
            f"{model.device} has {size(most)} in all; choose smaller ones"
        )
