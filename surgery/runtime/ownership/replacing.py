"""A folder that is built as a whole, beside its place, and then put there."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgery.errors import UserError
from surgery.runtime.ownership import steps
from surgery.runtime.ownership.complaints import reason, refuse
from surgery.runtime.ownership.files import governing, job
from surgery.runtime.ownership.folder import OwnedFolder, Survey, make_folders, within


class Building:
    """A folder that is being built beside its place."""

    def __init__(self, place: Path, path: Path, folder: OwnedFolder):
        self.place, self.path, self.folder = place, path, folder

    @contextmanager
    def filling(self) -> Iterator[Path]:
        """Yields the folder. What is in it afterwards and was not before is ours, also where a library wrote it."""
        before = {*self.place.rglob("*")}
        try:
            yield self.place
        finally:
            self.folder.note(*sorted({*self.place.rglob("*")} - before))

    def replace(self) -> None:
        """Put it at its place, in one step if the system can. What was there is removed if it is ours, every file of it; else
        nothing is changed. Raises UserError for what is not ours, there or in the folder itself."""
        contents = self.folder.survey()
        refuse(contents.foreign)
        target = self.path
        earlier = OwnedFolder.of(target) if target.is_dir() and any(target.iterdir()) else None
        self._modes(contents)
        if (outer := governing(target)) is not None:
            outer.note_folder(target)
        if earlier is None:  # nothing, or an empty folder; the system refuses any other
            os.rename(self.place, target)
            return
        earlier.hide("leaving", self.place.name)
        self._exchange()
        # What was there lies in the hidden place now, where nobody changes it: the last look.
        if others := OwnedFolder(self.place).survey().foreign:
            self._exchange()
            refuse(target / path.relative_to(self.place) for path in others)

    def _exchange(self) -> None:
        """With what is at its place. Without the system's help, the place is empty for a moment."""
        if not steps.exchange(self.place, self.path):
            aside = steps.hidden_name(self.path)
            OwnedFolder(self.path).hide("leaving", aside.name)
            os.rename(self.path, aside)
            os.rename(self.place, self.path)
            os.rename(aside, self.place)

    def merge(self) -> None:
        """Put the files of the folder one by one into the folder at its place, beside what is there. Files of ours there are
        replaced, weights of ours that have no successor removed. Raises UserError, and changes nothing, for the user's file of
        the same name."""
        target = self.path
        if not target.is_dir() or not any(target.iterdir()):
            self.replace()
            return
        contents, there = self.folder.survey(), OwnedFolder.of(target)
        refuse(contents.foreign)
        names = {path: target / path.relative_to(self.place) for path in contents.files}
        taken = [new for new in names.values() if os.path.lexists(new) and not (there is not None and there.owns(new))]
        refuse(taken)
        there = there or OwnedFolder.create(target)
        for name, value in self.folder.notes.items():
            there.remark(name, value)
        for folder in contents.folders:
            make_folders(target / folder.relative_to(self.place), there)
        self._modes(contents)
        for path, new in names.items():
            there.note(new, digest=steps.digest_of(path))
            steps.install(path, new, None if not os.path.lexists(new) else steps.digest_of(new))
            path.unlink(missing_ok=True)
        for name in there.files:
            path = target / name
            weights = name.endswith((".safetensors", ".safetensors.index.json"))
            if weights and "/" not in name and path not in names.values() and there.owns(path):
                path.unlink()

    def _modes(self, contents: Survey) -> None:
        """Files get the modes that the user's umask gives, and those that take the place of another its mode; libraries write
        some for the owner only."""
        usual = stat.S_IMODE(self.place.stat().st_mode)
        if self.path.is_dir():
            self.place.chmod(stat.S_IMODE(self.path.stat().st_mode))
        for path in (*contents.files, *contents.folders):
            earlier = self.path / path.relative_to(self.place)
            if earlier.exists() and earlier.is_dir() == path.is_dir():
                path.chmod(stat.S_IMODE(earlier.stat().st_mode))
            else:
                path.chmod(usual & (0o777 if path.is_dir() else 0o666))


@contextmanager
def building(path: Path) -> Iterator[Building]:
    """Yields a new folder beside `path`, to be filled, and then to take its place (Building.replace). If it does not, it is
    removed at the end. A link is followed. Raises OSError where the system refuses."""
    governor = governing(path)
    path = within(path, governor) if governor is not None else steps.real(path)
    make_folders(path.parent, governor)
    _sweep_beside(path)
    place = steps.hidden_name(path)
    if governor is not None:
        governor.note_folder(place)
    place.mkdir()
    lock = steps.lock(place)
    try:
        folder = OwnedFolder.create(place, hidden="building")
        with job() as mine:
            mine.append(folder)
            yield Building(place, path, folder)
    finally:
        _remove_left(place)
        if lock is not None:
            os.close(lock)


def _remove_left(place: Path) -> None:
    """Remove what was built and did not take its place, or what was there before. What is not ours stays, and is named."""
    from surgery.runtime.progress import say  # which brings a library for terminals

    if not place.is_dir():
        return
    try:
        folder = OwnedFolder.of(place)
        foreign = folder.clear() if folder is not None else []
        if not foreign:
            place.rmdir()
            return
        why = f"it holds '{foreign[0].name}', which is not ours"
    except (OSError, UserError) as error:  # a disk that is read-only by now
        why = reason(error)
    say(f"note: {place} stays: {why}")


def _sweep_beside(path: Path) -> None:
    """Clear up after killed builders of the folder `path`: hidden folders beside it whose own record says what they are (or
    that are empty), and that nobody fills. What was there before goes back if nothing took its place."""
    try:
        beside = [place for place in path.parent.iterdir() if steps.is_hidden(place, path)]
    except OSError:
        return
    for place in beside:
        with suppress(UserError, OSError):  # not ours, by its record; or its builder lives
            if place.is_symlink():
                continue
            if (folder := OwnedFolder.of(place)) is None:
                place.rmdir()  # which the system refuses unless it is empty
                continue
            if not any(map(folder.hidden, ("building", "leaving", "removing"))):
                continue
            lock = steps.lock(place, wait=False)
            try:
                if folder.hidden("leaving") and not os.path.lexists(path):
                    os.rename(place, path)
                else:
                    _remove_left(place)
            finally:
                if lock is not None:
                    os.close(lock)


def sweep(folder: OwnedFolder) -> None:
    """Remove the hidden files and folders that killed writers have left in the folder of a job, by its record."""
    for path in (folder.root / name for name in folder.files):
        if steps.HIDDEN.search(path.name) and folder.owns(path):
            path.unlink(missing_ok=True)
    for path in (folder.root / name for name in folder.folders):
        if (named := steps.HIDDEN.search(path.name)) is not None:
            _sweep_beside(path.with_name(path.name[1 : named.start()]))
