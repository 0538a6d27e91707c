"""The recipe of a built-in reference model: what `surgery pretrain` reads. See surgery/pretraining/pretrain.py."""

from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field

from surgery.errors import UserError
from surgery.records.complaints import complaint
from surgery.records.record import read_text
from surgery.records.renamed import advise, current
from surgery.records.sections.section import EXAMPLES, FACTOR, ROWS, STEPS, Count, Rows, Section, Steps
from surgery.records.site import Site, SitesText, SiteText
from surgery.records.yaml_text import parse_yaml


class Curriculum(Section):
    """One pair more whenever the running loss falls below the threshold."""

    section = "pretrain.curriculum"

    first: Count = 2
    """Pairs of a dictionary at the beginning."""
    last: Count = 8
    """Pairs of a dictionary at the end."""
    threshold: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """The running loss, in nats, at which the next size begins."""


class Hints(Section):
    """Which heads of a Transformer are to gather and to aggregate (surgery/pretraining/hints.py)."""

    section = "pretrain.hints"

    gather: SiteText
    """The head that is to gather."""
    aggregate: SiteText
    """The head that is to aggregate."""
    steps: Count = 500
    """At most this many steps with hints."""
    weight: float = Field(default=0.3, gt=0, allow_inf_nan=False)
    """Weight of the hints in the loss."""

    @pydantic.field_validator("gather", "aggregate")
    @classmethod
    def _one_head(cls, site: Site) -> Site:
        if len(site.heads) != 1:
            raise ValueError(f"{site} is not one head; write L1.H0")
        return site


class PretrainRecipe(Section):
    """How a built-in reference model is trained from scratch on the small world."""

    section = "pretrain"

    architecture: dict[str, Any]
    """Fields of the Hugging Face configuration. The size of the vocabulary follows from the tokenizer."""
    attention: SitesText = ()
    """Layers that are attention from the start: a hybrid, trained as one."""
    teacher: str | None = None
    """A Transformer's folder, whose hidden states the layers then learn to reproduce."""
    embedding_std: float = Field(default=0.25, gt=0, le=FACTOR, allow_inf_nan=False)
    """Standard deviation of the embeddings at the start."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of everything that is drawn at random."""
    steps: Steps = 3000
    """Steps of the whole model."""
    learning_rate: float = Field(default=3e-3, gt=0, le=FACTOR, allow_inf_nan=False)
    """The largest learning rate."""
    weight_decay: float = Field(default=0.01, ge=0, le=FACTOR, allow_inf_nan=False)
    """Weight decay of matrices and convolution filters; nothing else decays."""
    warmup_steps: Count = 100
    """Steps over which the learning rate rises."""
    decay_from: float = Field(default=0.6, ge=0, lt=1)
    """The share of the steps after which the learning rate falls linearly to a twentieth."""
    curriculum: Curriculum = Curriculum()
    """How dictionaries grow (section pretrain.curriculum)."""
    first_layer_steps: int = Field(default=1500, ge=0, le=STEPS)
    """At most this many steps of the first layers alone; the stage ends when the curriculum does."""
    first_layers: Count = 1
    """How many layers are the first ones: 2 for a mixer without a convolution, which needs a layer to gather and another one to
    aggregate."""
    hints: Hints | None = None
    """For a Transformer (section pretrain.hints)."""
    queries: Count = 16
    """At most this many questions follow one dictionary."""
    kv_targets: Rows = 256
    """Values asked for in a step."""
    text_sequences: int = Field(default=6, ge=0, le=ROWS)
    """Documents in a step."""
    text_sentences: Rows = 20
    """Sentences of a document."""
    letter_sequences: int = Field(default=4, ge=0, le=ROWS)
    """Sequences of lettered questions in a step."""
    letter_questions: Rows = 6
    """Questions of such a sequence."""
    examples: int = Field(default=1000, ge=2, le=EXAMPLES)
    """Examples of each measurement on the card."""


def read_pretrain_recipe(path: str | Path) -> PretrainRecipe:
    """Raises UserError in one line."""
    tree = parse_yaml(read_text(path, "the recipe"), f"recipe {path}")
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a recipe: it holds no keys")
    if "model" in tree and "architecture" not in tree:
        raise UserError(f"{path} is a recipe for `surgery run`; one for `surgery pretrain` has the key architecture")
    old: dict[str, str] = {}
    tree = current(tree, PretrainRecipe.section, old)
    advise(old)
    try:
        return PretrainRecipe.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UserError(f"recipe {path}: {complaint(error, PretrainRecipe)}") from error
