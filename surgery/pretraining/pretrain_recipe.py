"""The recipe of a pretraining run: the YAML files recipes/tiny-*.yaml."""

from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic import Field

from surgery.errors import UserError
from surgery.records.record import Record, first_line
from surgery.records.sections.section import Section
from surgery.records.site import Site, SiteText


class Curriculum(Record):
    """first, last: the numbers of pairs in a dictionary at the beginning and at the end. threshold: one pair more is added
    whenever the running loss falls below it, in nats."""

    first: int = 2
    last: int = 8
    threshold: float = 0.5


class Hints(Record):
    """The heads of a Transformer that are hinted to gather and to aggregate (hints.py). steps: at most so many have hints.
    weight: of the hints' loss."""

    gather: SiteText
    aggregate: SiteText
    steps: int = Field(default=500, ge=1)
    weight: float = Field(default=0.3, gt=0)

    @pydantic.field_validator("gather", "aggregate")
    @classmethod
    def _single(cls, site: Site) -> Site:
        if len(site.heads) != 1:
            raise ValueError(f"{site} is not one head; write L1.H0")
        return site


class PretrainRecipe(Section):
    """architecture: fields of the Hugging Face configuration; the vocabulary follows from the tokenizer."""

    section = "pretrain"

    architecture: dict[str, Any]
    attention: tuple[SiteText, ...] = ()  # layers that are attention from the start: a hybrid, trained as one
    teacher: str | None = None  # a Transformer's folder: the layers learn to do what its layers do (layer_alignment.py)
    embedding_std: float = 0.25
    seed: int = 0
    steps: int = Field(default=3000, ge=1)  # of the whole model
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay_from: float = 0.6  # the share of the steps after which the learning rate falls linearly to a twentieth
    curriculum: Curriculum = Curriculum()
    first_layer_steps: int = 1500  # at most; ends with the curriculum. 0 for architectures that need two layers to retrieve
    hints: Hints | None = None  # for a Transformer
    queries: int = 16
    kv_targets: int = 256
    text_sequences: int = 6
    text_sentences: int = 20
    letter_sequences: int = 4
    letter_questions: int = 6
    examples: int = 1000  # for the measurements on the card


def read_pretrain_recipe(path: str | Path) -> PretrainRecipe:
    """The recipe in a YAML file. Raises UserError in one line if it cannot be read or does not fit."""
    try:
        return PretrainRecipe.model_validate(yaml.safe_load(Path(path).read_text()))
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (pydantic.ValidationError, yaml.YAMLError) as error:
        detail = first_line(error) if isinstance(error, pydantic.ValidationError) else " ".join(str(error).split())
        raise UserError(f"recipe {path}: {detail}") from error
