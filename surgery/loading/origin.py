"""Where a base comes from, as far as this machine knows: for records and cards."""

import os
from pathlib import Path
from typing import Annotated

import pydantic
from huggingface_hub import metadata_load, try_to_load_from_cache

from surgery.records.names import display_name, on_hub
from surgery.records.reading import check_name
from surgery.records.record import Record
from surgery.runtime.ownership.files import note_down, noted

BASE = "base"  # what the note of its place is called
LICENCE = ("license", "license_name", "license_link")  # as cards of the Hub name them


class Origin(Record):
    """name: an id of the Hub, or the name of the base's folder; where that lies is in the folder's record of what is ours
    (runtime/ownership), which is not published. hub: which of the two. revision: the Hub's commit, where the copy here says
    it. licence: those of LICENCE that the base's card states."""

    name: Annotated[str, pydantic.AfterValidator(check_name)]
    hub: bool
    revision: str | None
    licence: dict[str, str]

    def place(self, folder: Path) -> str:
        """The name as load() takes it; folder: of this record. What is not there stays as it is."""
        if not self.hub and (way := noted(folder, BASE)) is not None:
            place = Path(os.path.normpath(folder.resolve() / way))
            return str(place) if place.is_dir() else self.name
        # Versions up to 0.17 wrote the way to the base here.
        beside = Path(os.path.normpath(folder.resolve() / self.name))
        return str(beside) if not self.hub and beside.is_dir() else self.name

    def published(self, folder: Path) -> "Origin":
        """For others, to whom it is no matter where the base lies here. folder: of this record."""
        return self if self.hub else self.model_copy(update={"name": Path(self.place(folder)).name})


def origin(name: str, record: Path) -> Origin:
    """What can be read without a network; what is not here stays empty. record: the folder in which it is to be written."""
    folder, revision, hub = Path(name), None, on_hub(name)
    if hub and isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
        folder = Path(cached).parent
        revision = folder.name
    card = folder / "README.md"
    stated = (metadata_load(card) or {}) if card.is_file() else {}
    if not hub:
        if Path(name).is_dir():  # so that both can be moved together, and be used from anywhere
            note_down(record, BASE, Path(os.path.relpath(Path(name).resolve(), record.resolve())).as_posix())
        name = display_name(name)
    return Origin(name=name, hub=hub, revision=revision, licence={key: str(stated[key]) for key in LICENCE if stated.get(key)})
