"""Probes: synthetic tasks with a metric that exposes retrieval, or watches over everything else.

One file per probe, found by listing this folder and those of the same name around the core (surgery/more/probes): a new probe
is a new file that defines `PROBES`, name -> dataclass. The first sentence of the dataclass says what the probe asks
(`surgery list probes` prints it), its fields are the probe's options. A probe makes `Question`s with choices, `Completion`s or
`Passage`s from a seed, which `surgery.probes.scoring` puts to a model, or `Writing`s (`surgery.probes.written`).
"""

import dataclasses
import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import pydantic
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.question import CompletionProbe, PassageProbe, Probe, WritingProbe
from surgery.records.complaints import none_named
from surgery.records.reading import shown
from surgery.runtime.listing import listed

AnyProbe = Probe | CompletionProbe | WritingProbe | PassageProbe
MOST = 10**6  # words, tokens or pairs of one question


@cache
def probes() -> dict[str, type]:
    """name -> the dataclass whose fields are the probe's options."""
    known: dict[str, type] = {}
    for module in listed("probes").values():
        known |= getattr(importlib.import_module(module), "PROBES", {})
    return known


def without_unseen(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a probe without the keys that only bench may ask for: for lessons, and for locating."""
    kind = probes().get(name)
    has_keys = kind is not None and any(field.name == "keys" for field in dataclasses.fields(kind))
    return ({"keys": "lessons"} if has_keys else {}) | dict(options)


def make(name: str, /, *, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> AnyProbe:
    """The probe of that name. Raises UserError for a name or an option that does not exist, and for a value that does not fit.

    tokenizer: of the model that will be asked. Only a probe that measures its prompts in tokens needs it; others ignore it.
    """
    if name not in probes():
        raise UserError(none_named("probe", name, probes()))
    kind = probes()[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    if fields.pop("tokenizer", None):
        if tokenizer is None:
            raise UserError(f"the probe '{name}' needs a tokenizer")
        given["tokenizer"] = tokenizer
    types = get_type_hints(kind)
    for option, value in options.items():
        if option not in fields:
            raise UserError(f"the probe '{name}' has no option '{option}'; its options are {', '.join(fields)}")
        try:
            given[option] = pydantic.TypeAdapter(types[option]).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            message = error.errors()[0]["msg"].lower()
            raise UserError(f"the probe '{name}': option '{option}' is {shown(repr(value))}; {message}") from error
        if type(value) is int and abs(value) > MOST:
            raise UserError(f"the probe '{name}': option '{option}' is {shown(value)}; no probe takes more than {MOST:,}")
    for option, field in fields.items():
        if option not in given and field.default is dataclasses.MISSING:
            raise UserError(f"the probe '{name}' needs the option '{option}'")
    return kind(**given)
