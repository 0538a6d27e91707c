"""The README.md of a base that was trained on text of one's own."""

from datetime import UTC, datetime
from typing import Any

from transformers import PreTrainedModel

from surgery.models.anatomy import anatomy
from surgery.pretraining.corpus import Corpus
from surgery.pretraining.corpus_measuring import PAIRS, RARE
from surgery.pretraining.recipe import CorpusOptions, PretrainRecipe
from surgery.records.names import display_name, in_markdown
from surgery.records.record import provenance
from surgery.runtime.progress import duration


def corpus_card(
    recipe: PretrainRecipe, options: CorpusOptions, model: PreTrainedModel, corpus: Corpus, measured: dict[str, Any],
    seconds: float, name: str,
) -> str:  # fmt: skip
    """measured: as measure_on_corpus gives it. seconds: of training."""
    source = provenance(name, "", recipe.seed)
    structure = anatomy(model)
    seen = recipe.steps * options.batch_size * options.tokens
    learnt, held_out = corpus.about["train"], corpus.about["held_out"]
    packages = ", ".join(f"{package} {version}" for package, version in source.packages.items())
    about = f"\n{options.about.strip()}\n" if options.about.strip() else ""
    words = "its own byte-level BPE"
    if options.tokenizer is not None:
        words = f"the tokenizer of {in_markdown(display_name(options.tokenizer))}"
    begun, known = "from scratch", "Nothing was done for retrieval: whatever it retrieves, it learnt from that text."
    if recipe.start is not None:
        begun, known = (
            f"further, from the weights of {in_markdown(display_name(recipe.start))},",
            "What that model knew before is not told here.",
        )
    names = ""
    if options.rename is not None:
        rare = f"tokens that occur at most {options.rename.rare:g} times in a million"
        names = f", in each of which {rare} had been given other names"
        known = "It could know no rare name by heart, and was taught to retrieve in no other way."
    if options.repeats:
        names += f"; {options.repeats:.0%} of the windows repeated a passage of their own until they ended"
        known = "It was taught to repeat passages of its text, and to retrieve in no other way."
    return f"""---
library_name: transformers
tags: [{model.config.model_type}]
---
# {in_markdown(name)}

A language model of the class {model.config.model_type} with {model.num_parameters():,} parameters \
({len(structure.blocks)} layers of {structure.heads(0)} heads), trained {begun} on running text with {words} of \
{len(corpus.tokenizer):,} tokens. {known}
{about}
It learnt from {_files(learnt["files"])}, {learnt["bytes"] / 1e6:.1f} MB, {learnt["tokens"]:,} tokens, of which it saw \
{seen:,} ({seen / learnt["tokens"]:.2f} times the text) in windows of {options.tokens}{names}. It was measured on \
{_files(held_out["files"], "other ")} of {held_out["bytes"] / 1e6:.1f} MB.

Held-out loss, with 95% intervals over {measured["windows"]:,} windows: {_figure(measured["nats_per_token"])} nats per token, \
{_figure(measured["nats_per_byte"])} nats per byte.

A *recall hit* is a token that completes a pair of tokens which occurred before in the same row, and which occurs at most \
{RARE:g} times in a million tokens of the text that was learnt: most often a name. Longer rows hold other hits, from farther \
back, so their figures are not to be compared. Nats per token:

| tokens of a row | recall hits | all others |
|---|---|---|
{_rows(measured)}

Key-value retrieval (a dictionary in the prompt of arXiv 2504.18574), which its text does not hold:

| pairs | accuracy | chance |
|---|---|---|
{_retrieval(measured)}

Trained until {datetime.now(UTC).date()}, in {duration(seconds)} on {source.machine}, {source.threads_in_words}; seed \
{recipe.seed}; {packages}. The recipe is `recipe.yaml`, the losses `log.jsonl`, the figures above `measured.json`.
"""


def _files(count: int, which: str = "") -> str:
    return f"{count} {which}file{'s' * (count != 1)}"


def _figure(estimate: dict[str, Any]) -> str:
    low, high = estimate["ci95"]
    return f"{estimate['value']:.3f} [{low:.3f}, {high:.3f}]"


def _rows(measured: dict[str, Any]) -> str:
    lengths = [key.removeprefix("others.") for key in measured if key.startswith("others.")]
    figures = [[measured.get(f"{name}.{length}") for name in ("hits", "others")] for length in lengths]
    return "\n".join(
        f"| {length} | " + " | ".join("none" if value is None else _figure(value) for value in row) + " |"
        for length, row in zip(lengths, figures, strict=True)
    )


def _retrieval(measured: dict[str, Any]) -> str:
    rows = ((pairs, measured[f"kv.{pairs}"]) for pairs in PAIRS)
    return "\n".join(
        f"| {pairs} | {figure['accuracy']:.3f} [{figure['ci95'][0]:.3f}, {figure['ci95'][1]:.3f}] | {1 / pairs:.3f} |"
        for pairs, figure in rows
    )
