"""The README.md of a built-in checkpoint."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgery.models.anatomy import anatomy
from surgery.pretraining.measuring import SIZES
from surgery.pretraining.recipe import PretrainRecipe
from surgery.records.names import as_code, in_markdown, one_line
from surgery.records.record import provenance


def card(recipe: PretrainRecipe, model: PreTrainedModel, measured: dict[str, Any], seconds: float, name: str) -> str:
    """The README.md of a built-in checkpoint. measured: as `measure` gives it. seconds: of training."""
    source = provenance(name, "", recipe.seed)
    structure = anatomy(model)
    layers, heads = len(structure.blocks), structure.heads(0)
    where = f"{source.machine}, {source.threads_in_words}"
    packages = ", ".join(f"{package} {version}" for package, version in source.packages.items())
    names = {f"kv.{pairs}": f"key-value retrieval, {pairs} pairs" for pairs in SIZES}
    names |= {"knowledge": "fact cloze (held-out templates)", "letters": "lettered questions (held-out prompts)"}
    table = "\n".join(
        f"| {label} | {measured[key]['accuracy']:.3f} | [{measured[key]['ci95'][0]:.3f}, {measured[key]['ci95'][1]:.3f}] "
        f"| {measured[key]['n']} |"
        for key, label in names.items()
    )
    return f"""---
library_name: transformers
license: apache-2.0
tags: [{model.config.model_type}, toy, retrieval]
---
# {in_markdown(name)}

A language model of the class {model.config.model_type} with {model.num_parameters():,} parameters
({layers} layers of {heads} heads),
{_origin(recipe)} a generated *small world*: narrative sentences, 500 facts about a hundred invented people,
key-value dictionaries in the prompt of arXiv 2504.18574, and lettered questions. It exists to show, on a laptop, what its
architecture is good and bad at, retrieval above all. It is good for nothing else.

Measured on held-out examples when it was made (accuracy, 95% interval, n):

| probe | accuracy | 95% interval | n |
|---|---|---|---|
{table}

Perplexity on held-out documents: {measured["perplexity"]:.3f}.

What is held out: dictionaries and documents are drawn from other seeds; a narrative sentence is in training documents or in
held-out ones, never in both; each fact is asked in a template in which training never states it; lettered prompts are split
like sentences.

Trained {datetime.now(UTC).date()} in {seconds / 60:.0f} minutes on {where}; seed {recipe.seed};
{packages}. The recipe is `recipe.yaml`, the losses `log.jsonl`, the figures above `measured.json`. To make it again:

    surgery pretrain recipes/{one_line(name)}.yaml --out checkpoints/{one_line(name)}
"""


def _origin(recipe: PretrainRecipe) -> str:
    if recipe.hints is not None:
        return (
            f"trained from scratch, with hints in the first steps that head {recipe.hints.gather} should gather and head "
            f"{recipe.hints.aggregate} aggregate (`surgery/pretraining/hints.py`), on"
        )
    if recipe.teacher is None:
        return "trained from scratch on"
    return f"its layers aligned one by one with those of {as_code(Path(recipe.teacher).name)} on"
