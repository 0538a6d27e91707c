"""The recipe of a built-in reference model: what `surgery pretrain` reads. See surgery/pretraining/pretrain.py."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from surgery.errors import UserError
from surgery.records.complaints import complaint
from surgery.records.record import read_text
from surgery.records.sections.section import (
    EXAMPLES,
    FACTOR,
    MOST,
    ROWS,
    STEPS,
    TOKENS,
    Count,
    Examples,
    Name,
    Rows,
    Section,
    Steps,
    check_tokens,
    none_for_no,
)
from surgery.records.sections.tuning import Rename
from surgery.records.site import Site, SitesText, SiteText
from surgery.records.yaml_text import parse_yaml

KEYS = 128  # words of the small world that may be keys of a dictionary


class Curriculum(Section):
    """One pair more whenever the running loss falls below the threshold."""

    section = "pretrain.curriculum"

    first: Count = 2
    """Pairs of a dictionary at the beginning."""
    last: Count = 8
    """Pairs of a dictionary at the end."""
    threshold: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """The running loss, in nats, at which the next size begins."""

    @pydantic.model_validator(mode="after")
    def _grows(self) -> Self:
        if not self.first <= self.last <= KEYS:
            raise ValueError(f"from {self.first} to {self.last} pairs: first is at most last, and last at most {KEYS}")
        return self


class PretrainHints(Section):
    """Which heads of a model without convolutions are to gather and to aggregate (surgery/pretraining/hints.py)."""

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


class CorpusRename(Rename):
    __doc__ = Rename.__doc__

    section = "pretrain.corpus.rename"


class CorpusOptions(Section):
    """Plain text of one's own to learn from, in place of the small world (surgery/pretraining/corpus.py). What training has
    reached is kept in <out>-pretraining, where the same command goes on."""

    section = "pretrain.corpus"

    train: Annotated[tuple[Name, ...], Field(min_length=1)]
    """What is learnt: plain text files, each a document, or folders, of which all .txt and .md files are taken."""
    held_out: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Other text, given likewise, on which the loss is measured."""
    tokenizer: Name | None = None
    """An existing tokenizer, an id of the Hub or a folder; by default that of `start`, or else a byte-level BPE, trained on
    the text to learn."""
    vocabulary: int = Field(default=4096, ge=257, le=MOST)
    """How many tokens a trained tokenizer has: 256 bytes, one that ends a text, and merges."""
    tokens: int = Field(default=512, ge=2, le=TOKENS)
    """Tokens of a window."""
    batch_size: Rows = 16
    """Windows of a step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The precision in which the checkpoint is stored."""
    eval_steps: Count = 500
    """Steps between two measurements of the held-out loss."""
    eval_windows: Examples = 64
    """Windows of held-out text that are measured then; when training ends, four times as many."""
    save_steps: Count = 100
    """Steps between two saved states; the state is also saved when a signal ends the work."""
    rename: CorpusRename | None = Field(default=None, exclude_if=lambda rename: rename is None)
    """Gives rare tokens other names from the first step on: in every window anew, and alike throughout it, so that repeats
    have to be recalled. The log then has the loss on repeated rare pairs of held-out text and on their first occurrences."""
    repeats: float = Field(default=0.0, ge=0, le=1, exclude_if=lambda share: not share)
    """The share of the windows that repeat a passage of their own until they end. Models learn to recall sooner from them."""
    about: str = ""
    """For the model card: where the text comes from, and its licence."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Self:
        check_tokens(batch_size=self.batch_size, tokens=self.tokens)
        check_tokens(eval_windows=self.eval_windows, tokens=self.tokens)
        return self


OF_THE_TOKENIZER = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "dtype", "torch_dtype"}
# Settings of the small world's lessons, which mean nothing for other text.
OF_THE_WORLD = (
    "teacher", "curriculum", "first_layer_steps", "first_layers", "hints", "queries", "kv_targets", "text_sequences",
    "text_sentences", "needle_sequences", "needle_sentences", "needle_queries", "letter_sequences",
)  # fmt: skip


class PretrainRecipe(Section):
    """How a model is trained from scratch: a built-in reference model on the small world, or a base on one's own text."""

    section = "pretrain"

    architecture: dict[str, Any] = {}
    """Fields of the Hugging Face configuration. The size of the vocabulary follows from the tokenizer."""
    start: Name | None = None
    """With corpus, in place of architecture: a model of the Hub or a folder, whose weights training begins with. Its
    tokenizer is taken, too, unless corpus.tokenizer names one."""
    corpus: CorpusOptions | None = None
    """Text of one's own, in place of the small world (section pretrain.corpus)."""
    attention: SitesText = ()
    """Layers that are attention from the start: a hybrid, trained as one."""
    attention_head_dim: Annotated[int, Field(ge=1, le=2**14)] | None = None
    """Width of a head in these layers; by default 64 where that divides the hidden size."""
    teacher: Name | None = None
    """A Transformer's folder, whose hidden states the layers then learn to reproduce."""
    embedding_std: float = Field(default=0.25, gt=0, le=FACTOR, allow_inf_nan=False)
    """Standard deviation of the embeddings at the start."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of everything that is drawn at random."""
    steps: Steps = 3000
    """Steps of the whole model."""
    learning_rate: float = Field(default=3e-3, gt=0, le=FACTOR, allow_inf_nan=False)
    """The largest learning rate."""
    weight_decay: float = Field(default=0.01, ge=0, le=FACTOR, allow_inf_nan=False)
    """Weight decay of matrices and convolution filters; nothing else decays."""
    mixed_precision: Annotated[Literal["bf16"] | None, pydantic.BeforeValidator(none_for_no)] = None
    """bf16: compute in bfloat16, keep the weights in float32."""
    warmup_steps: Count = 100
    """Steps over which the learning rate rises."""
    decay_from: float = Field(default=0.6, ge=0, lt=1)
    """The share of the steps after which the learning rate falls linearly to a twentieth."""
    curriculum: Curriculum = Curriculum()
    """How dictionaries grow (section pretrain.curriculum)."""
    first_layer_steps: int = Field(default=1500, ge=0, le=STEPS)
    """At most this many steps of only the first layers; the stage ends when the curriculum does."""
    first_layers: Count = 1
    """How many layers are the first ones: 2 for a mixer without a convolution, which needs a layer to gather and another one to
    aggregate."""
    hints: PretrainHints | None = None
    """For a model without convolutions (section pretrain.hints)."""
    queries: Count = 16
    """At most this many questions follow one dictionary."""
    kv_targets: Rows = 256
    """Values asked for in a step."""
    text_sequences: int = Field(default=6, ge=0, le=ROWS)
    """Documents in a step."""
    text_sentences: Rows = 20
    """Sentences of a document."""
    needle_sequences: int = Field(default=0, ge=0, le=ROWS)
    """Documents in a step that tell numbers and ask for them at their end: retrieval with text between the pairs."""
    needle_sentences: int = Field(default=6, ge=0, le=ROWS)
    """At most this many sentences of such a document tell no number."""
    needle_queries: Count = 4
    """At most this many of them are asked for."""
    letter_sequences: int = Field(default=4, ge=0, le=ROWS)
    """Sequences of lettered questions in a step."""
    examples: int = Field(default=1000, ge=2, le=EXAMPLES)
    """Examples of each measurement on the card."""

    @pydantic.model_validator(mode="after")
    def _makes_a_model(self) -> Self:
        if self.start is None and not self.architecture:
            raise ValueError("architecture: is missing")
        if self.start is not None and (self.architecture or self.attention or self.teacher):
            raise ValueError("start: is a whole model; leave out architecture, attention and teacher")
        if self.start is not None and self.corpus is None:
            raise ValueError("start: is for text of one's own (corpus)")
        if heads := next((site for site in self.attention if site.heads), None):
            raise ValueError(f"attention: whole layers are attention from the start; write L{heads.layer}, not {heads}")
        if self.attention_head_dim is not None and not self.attention:
            raise ValueError("attention_head_dim: no layer is attention from the start (attention)")
        if given := sorted(OF_THE_TOKENIZER & {*self.architecture}):
            raise ValueError(
                f"architecture: leave out {', '.join(given)}; words follow from the tokenizer, and dtype is float32"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _of_one_world(self) -> Self:
        """Refuse lessons of the small world beside other text."""
        if self.corpus is not None:
            for name in OF_THE_WORLD:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: belongs to the small world, and corpus names other text; leave out one")
        return self

    def written(self) -> dict[str, Any]:
        """What a checkpoint's recipe.yaml holds: all settings, defaults included, but for those that mean nothing here."""
        return self.model_dump(mode="json", exclude={"corpus", "start"} if self.corpus is None else set(OF_THE_WORLD))


def read_pretrain_recipe(path: str | Path) -> PretrainRecipe:
    """Raises UserError in one line."""
    tree = parse_yaml(read_text(path, "the recipe"), f"recipe {path}")
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a recipe: it holds no keys")
    if "model" in tree and not {"architecture", "start"} & {*tree}:
        raise UserError(f"{path} is a recipe for `surgery run`; one for `surgery pretrain` has the key architecture")
    return parsed_pretrain_recipe(tree, f"recipe {path}")


def parsed_pretrain_recipe(tree: dict[str, Any], source: str) -> PretrainRecipe:
    """Raises UserError in one line, which begins with `source`."""
    try:
        return PretrainRecipe.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UserError(f"{source}: {complaint(error, PretrainRecipe)}") from error
