"""Where a base comes from, as far as this machine knows: for records and cards."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from pydantic import Field

from surgery.errors import UserError
from surgery.records.record import Record
from surgery.runtime.files import read_text
from surgery.runtime.yaml import parse_yaml

LICENCE = ("license", "license_name", "license_link")  # as cards of the Hub name them
LONGEST = 2**20  # bytes of a card that is read


class Origin(Record):
    """The base of a hybrid."""

    name: str
    """An id of the Hub, or the name of the base's folder."""
    hub: bool = False
    """Whether it is an id of the Hub."""
    revision: str | None = None
    """The Hub's commit, where the copy here says it."""
    licence: dict[str, str] = Field(default={})
    """What the base's card states of it."""
    path: str | None = None
    """From the folder that holds this record to the base's folder; not published."""

    def place(self, folder: Path) -> str:
        """The base's name as load() takes it. folder: holds this record."""
        beside = None if self.path is None else Path(os.path.normpath(folder.resolve() / self.path))
        return str(beside) if beside is not None and (beside.is_dir() or not self.hub) else self.name


def find_origin(base: str | Path, record: Path) -> Origin:
    """What can be said of a base without a network. record: the folder that the Origin will be written to."""
    name, folder = str(base), Path(base)
    if folder.is_dir():
        path = os.path.relpath(folder.resolve(), record.resolve())
        return Origin(name=folder.resolve().name, licence=read_licence(folder / "README.md"), path=Path(path).as_posix())
    hub = name.count("/") == 1 and not folder.is_absolute()
    cached = try_to_load_from_cache(name, "config.json") if hub else None
    if not isinstance(cached, str):
        return Origin(name=name if hub else folder.name, hub=hub)
    copy = Path(cached).parent
    return Origin(name=name, hub=True, revision=copy.name, licence=read_licence(copy / "README.md"))


def read_licence(card: Path) -> dict[str, str]:
    """What the front matter of a stranger's README.md states of the licence; nothing where it cannot be read."""
    try:
        if not card.is_file() or card.stat().st_size > LONGEST:
            return {}
        _, _, rest = read_text(card).partition("---\n")
        stated: Any = parse_yaml(rest.partition("\n---")[0], str(card))
    except (UserError, OSError):
        return {}
    return {key: str(stated[key])[:200] for key in LICENCE if stated.get(key)} if isinstance(stated, dict) else {}
