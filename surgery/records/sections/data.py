"""Where text and facts come from."""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from surgery.records.sections.section import Name, Section, check_weights


class Text(Section):
    """A source of text, one of a mixture. All but plain text files, and folders of such, hold documents, in `column`."""

    section = "data.train_text"

    source: Name
    """`world` (the small world of the built-in models), a text file or a folder of them (.txt, .md), a .jsonl, .json, .csv or
    .parquet file or a folder of those, or the id of a dataset on the Hub."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the mixture, relative to the other weights."""
    column: str = "text"
    """The field of a document that holds its text."""
    subset: str | None = None
    """The subset (configuration) of a dataset on the Hub."""
    split: str = "train"
    """The split of a dataset on the Hub."""
    streaming: bool = False
    """Read the documents in order while training, instead of loading them first."""


def _mixture(value: Any) -> Any:
    return ({"source": value},) if isinstance(value, str) else value


class Skill(Section):
    """A skill of the base other than the one it is edited for: a probe with choices."""

    section = "data.skills"

    probe: str
    """A probe by name (`surgery list probes`)."""
    options: dict[str, Any] = {}
    """The probe's options."""


def _skills(value: Any) -> Any:
    """Skills by the names of their probes alone, or with options."""
    if value in ("auto", ["auto"], ("auto",)):
        return "auto"
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        return value
    return tuple({"probe": each.strip()} if isinstance(each, str) else each for each in given if each != "")


class Data(Section):
    """The text that tuning sees, the text and facts that a model is measured on, and the skills that it must not lose."""

    section = "data"

    train_text: Annotated[tuple[Text, ...], pydantic.BeforeValidator(_mixture), Field(min_length=1)] = (Text(source="world"),)
    """Text for the KL term of tuning: one source, or a list of sources, each with a weight (section data.train_text)."""
    held_out_text: Name = "world"
    """Text for perplexity: `world`, or a file. It must be other text than train_text: contents are compared, and at most 5% may
    be shared."""
    facts: Name = "world"
    """Facts for the knowledge probes: `world`, `capitals` (real ones, for real models), or a .jsonl file. Of a file a quarter
    is asked while planning and tuning, and the rest by bench."""
    skills: Annotated[Literal["auto"] | tuple[Skill, ...], pydantic.BeforeValidator(_skills)] = "auto"
    """Skills that an edit must not cost (section data.skills). locate measures each head on them, plan.heads: auto and early
    stopping bound their loss, tuning holds the answers to the base's, and bench compares them. auto: kv with 16 pairs, letters
    and knowledge, without those that tune.lessons teach. []: none."""

    @pydantic.field_validator("train_text")
    @classmethod
    def _drawn(cls, texts: tuple[Text, ...]) -> tuple[Text, ...]:
        check_weights(text.weight for text in texts)
        return texts
