"""The formats of an export, one file each, found by listing this folder and those of the same name around the core
(surgery/serving/formats): a new format is a new file.

The first paragraph of the file says what the format is (`surgery list formats` prints it). What else a file holds, the protocol
Format says. Only a format that is asked for is imported, so that help texts wait for nothing.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from surgery.errors import UserError
from surgery.runtime.listing import described, listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from surgery.exporting.verify import Reader
    from surgery.records.plan import Plan


class Format(Protocol):
    """A module of such a folder that writes hybrids in one form.

    It may also hold: OF_BASES = True, if it writes bases too; QUANTISED = True, if it holds integers; `why_not(config)`, why
    it cannot hold a hybrid or a base of that configuration (None if it can); `space(hybrid)`, the bytes that it takes while
    it is written, if not those of all tensors; and `clear(folder)`, which removes after the proof what only its reader needed.
    """

    USE: str  # three lines of Python that load the folder NAME
    READER: "Reader"  # what proves it

    def write(
        self, hybrid: "PreTrainedModel", folder: Path, *, tokenizer: "PreTrainedTokenizerBase", plan: "Plan", base: str
    ) -> None:
        """Write weights, configuration and tokenizer. Raises UserError where the form cannot hold the hybrid exactly.

        base: the name of the base, as load() takes it. A format may take options of its own, by keyword.
        """


def names() -> list[str]:
    """Of all formats; the complete folder comes first."""
    return sorted(listed("formats"), key=lambda name: (name != "hf", name))


def descriptions() -> dict[str, str]:
    """name -> what the format is, read off the file's text."""
    said = described("formats")
    return {name: said[name] for name in names()}


def check_format(name: str) -> None:
    """Raise UserError for what is not a format."""
    if name not in names():
        raise UserError(f"cannot export as '{name}'; there are {', '.join(names())}")


def format_of(name: str) -> Any:
    """The Format of that name. Raises UserError if there is none."""
    check_format(name)
    return importlib.import_module(listed("formats")[name])


def of_bases() -> list[str]:
    """The formats in which a base can be written too, to be served beside its hybrid."""
    return [name for name in names() if writes_bases(name)]


def writes_bases(name: str) -> bool:
    """Whether a base can be written in a format."""
    return bool(getattr(format_of(name), "OF_BASES", False))


def why_not(name: str, config: Any) -> str | None:
    """Why a hybrid or a base of this configuration cannot be written in a format; None if it can."""
    form = format_of(name)
    if getattr(config, "quantization_config", None) and (reason := integers_why_not(name)):
        return reason
    ask = getattr(form, "why_not", None)  # a format without the function holds all
    return None if ask is None else ask(config)


def integers_why_not(name: str) -> str | None:
    """Why a format cannot hold a quantised model; None if it can."""
    if getattr(format_of(name), "QUANTISED", False):
        return None
    return (
        f"a quantised base cannot be written as '{name}', whose weights are floating-point numbers; splice and export "
        "with the base as it was before"
    )
