"""What the folder of a hybrid says of its base."""

from pathlib import Path

from surgery.exporting.folder import RECORD, Exported
from surgery.records.plan import PATCH
from surgery.splicing.joining import Patch
from surgery.splicing.remembered import read_surgery


def is_patch(name: str) -> bool:
    return (Path(name) / PATCH).exists()


def base_of(name: str) -> str:
    """The name of a hybrid's base, as load() takes it: from anywhere, since the record is relative to the hybrid's folder."""
    folder = Path(name)
    if is_patch(name):
        return Patch.read(folder / PATCH).base.place(folder)
    if (folder / RECORD).exists():
        return Exported.read(folder / RECORD, unsealed="take").base.place(folder)
    return read_surgery(folder).base or name
