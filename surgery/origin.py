"""Where a base comes from, as far as this machine knows: for records and cards."""

import os
from pathlib import Path

from huggingface_hub import metadata_load, try_to_load_from_cache

from surgery.names import called, on_hub
from surgery.records import Record

__all__ = ["Origin", "on_hub", "origin"]

LICENCE = ("license", "license_name", "license_link")  # as cards of the Hub name them


class Origin(Record):
    """name: an id of the Hub, or a folder's name. hub: which of the two. place: of a folder on this machine, where it is as
    seen from the folder that holds this record, so that both may move; not published. revision: the Hub's commit, where the
    copy here says it. licence: those of LICENCE that the base's card states. (Versions up to 0.5.1 wrote the place as the name,
    as it was given.)"""

    name: str
    hub: bool
    place: str | None = None
    revision: str | None
    licence: dict[str, str]

    def seen_from(self, folder: Path) -> str:
        """What load() takes, for a record in `folder`."""
        beside = os.path.normpath(os.path.join(os.path.realpath(folder), self.place or self.name))
        return beside if not self.hub and os.path.isdir(beside) else self.name

    def published(self) -> "Origin":
        return self.model_copy(update={"name": called(self.name), "place": None})


def origin(name: str, folder: Path) -> Origin:
    """Of a base, for a record in `folder`: what can be read without a network; what is not here stays empty."""
    place, revision, hub = Path(name), None, on_hub(name)
    if hub and isinstance(found := try_to_load_from_cache(name, "config.json"), str):
        place = Path(found).parent
        revision = place.name
    card = place / "README.md"
    stated = (metadata_load(card) or {}) if card.is_file() else {}
    licence = {key: str(stated[key]) for key in LICENCE if stated.get(key)}
    beside = os.path.relpath(name, os.path.realpath(folder)) if not hub and place.is_dir() else None
    return Origin(name=called(name), hub=hub, place=beside, revision=revision, licence=licence)
