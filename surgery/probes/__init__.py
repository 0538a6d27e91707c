"""Probes: sources of questions that need retrieval, or that watch over everything else.

One file a probe, found by listing this folder: a new probe is a new file whose `PROBE` is a dataclass. The first line of the
file says what the probe asks (`surgery list probes` prints it); the fields of the dataclass are the probe's options.
"""

import dataclasses
import importlib
from typing import Any, get_type_hints

import pydantic
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.question import Probe
from surgery.records.recipe import TOY
from surgery.runtime.listing import list_modules

MOST = 10**6  # words, tokens or pairs of one question


def probe_class(name: str) -> type:
    """The dataclass of a probe, whose fields are its options. Raises UserError for a name that does not exist."""
    known = list_modules("probes", "PROBE")
    if name not in known:
        raise UserError(f"there is no probe '{name}'; there are {', '.join(known)}")
    return importlib.import_module(f"surgery.probes.{name}").PROBE


def make_probe(name: str, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> Probe:
    """The probe of that name. Raises UserError for a name or an option that does not exist, and for a value that does not fit.

    tokenizer: of the model that will be asked. Only a probe that measures its prompts in tokens needs it; others ignore it.
    """
    kind = probe_class(name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    if fields.pop("tokenizer", None):
        if tokenizer is None:
            raise UserError(f"the probe '{name}' needs a tokenizer")
        given["tokenizer"] = tokenizer
    types = get_type_hints(kind)
    for option, value in options.items():
        if option not in fields:
            raise UserError(f"the probe '{name}' has no option '{option}'; its options are {', '.join(fields) or 'none'}")
        try:
            given[option] = pydantic.TypeAdapter(types[option]).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            message = error.errors()[0]["msg"].lower()
            raise UserError(f"the probe '{name}': option '{option}' is {repr(value)[:80]}; {message}") from error
        if isinstance(value, int | float) and not abs(value) <= MOST:
            raise UserError(f"the probe '{name}': option '{option}' is {repr(value)[:80]}; no probe takes more than {MOST:,}")
    for option, field in fields.items():
        if option not in given and field.default is dataclasses.MISSING:
            raise UserError(f"the probe '{name}' needs the option '{option}'")
    return kind(**given)


def training_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options with which planning and tuning ask: without the keys, documents and facts that are for bench alone."""
    fields = {field.name for field in dataclasses.fields(probe_class(name))}
    defaults = {"keys": "seen", "part": "tune"}
    given = {option: value for option, value in defaults.items() if option in fields} | options
    return given | {"source": "toy-training"} if name == "needle" and given.get("source", TOY) == TOY else given
