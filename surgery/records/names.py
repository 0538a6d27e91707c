"""Names of models and files for records that others read: ids of the Hub and names of folders, no path on this machine."""

import os
import re
from pathlib import Path
from typing import Any

from surgery.runtime.printable import printable

# What a run and a comparison call their controls (jobs/entries.py, commands/controls.py). Any other name of a model is the
# user's.
CONTROL_TUNED = "control_tuned"
CONTROL = re.compile(r"control_(tuned(_\d+)?|lora_tuned|(random_site(_\d+)?|same_layer|random_windows)(_tuned)?)")
HUB = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", flags=re.ASCII)  # user/name
MARKUP = re.compile(r"[\\`*\[\]<>|]")


def is_control(name: str) -> bool:
    """Whether a report's model is one of a run's controls."""
    return CONTROL.fullmatch(name) is not None


def on_hub(name: str) -> bool:
    """Whether a model's name is an id of the Hub, and not a path on this machine."""
    return HUB.fullmatch(name) is not None and not Path(name.split("/", maxsplit=1)[0]).is_dir()


def display_name(name: str) -> str:
    """The name of a model or a file for others: an id of the Hub or a URL as it is, of a path its last part."""
    if on_hub(name) or ("://" in name and not name.startswith("file:")):
        return name
    last = Path(name).name
    return last if last.strip(".") else os.path.basename(os.path.abspath(name)) or "model"


def one_line(name: str) -> str:
    """A name in one line, for terminals and pages."""
    return " ".join(printable(name).split())


def in_markdown(name: str) -> str:
    """A name as it is to be read in a page, whatever characters it has."""
    return MARKUP.sub(r"\\\g<0>", one_line(name))


def as_code(name: str) -> str:
    """A name as code in a page."""
    name = one_line(name)
    fence = "`" * (1 + max(map(len, re.findall("`+", name)), default=0))
    blank = " " if name[:1] == "`" or name[-1:] == "`" else ""
    return f"{fence}{blank}{name}{blank}{fence}"


def strip_paths(value: Any) -> Any:
    """A tree of JSON values in which every path is replaced by its last part."""
    if isinstance(value, dict):
        return {key: strip_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strip_paths(item) for item in value]
    return display_name(value) if isinstance(value, str) and (os.sep in value or value.startswith("~")) else value
