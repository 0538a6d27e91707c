"""Names of models and files, for records that others read: ids of the Hub and folders' names, and no place on this machine."""

import os
from pathlib import Path
from typing import Any


def on_hub(name: str) -> bool:
    """Whether a model's name is an id of the Hub, and not a place on this machine."""
    return not (name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name.split("/", maxsplit=1)[0]).is_dir())


def called(name: str) -> str:
    """A model's or a file's name for others, to whom it is no matter where it lies here: an id of the Hub or an address as it
    is, of a place its last part."""
    if on_hub(name) or ("://" in name and not name.startswith("file:")):
        return name
    last = Path(name).name
    return last if last.strip(".") else os.path.basename(os.path.abspath(name)) or "model"


def public(value: Any) -> Any:
    """A tree of JSON values whose texts name no place on this machine: as called() has them."""
    if isinstance(value, dict):
        return {key: public(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [public(each) for each in value]
    return called(value) if isinstance(value, str) and (os.sep in value or value.startswith("~")) else value
