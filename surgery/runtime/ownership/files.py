"""Where files go: into the record of the folder of the job that runs."""

import hashlib
import os
import stat
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgery.errors import UserError
from surgery.runtime.ownership import steps
from surgery.runtime.ownership.complaints import refuse, saying
from surgery.runtime.ownership.folder import OwnedFolder, make_folders, within

_jobs: list[list[OwnedFolder]] = [[]]  # the folders of the jobs that run, one within the other


@contextmanager
def job() -> Iterator[list[OwnedFolder]]:
    """Meanwhile, what `enter` opens is this job's, and in the list that is yielded."""
    _jobs.append([])
    try:
        yield _jobs[-1]
    finally:
        _jobs.pop()


def enter(root: Path) -> OwnedFolder:
    """Until the job ends, what is written below `root` goes into its record. Makes folder and record where there are none."""
    with saying(root):
        free = not os.path.lexists(root) or (root.is_dir() and not any(root.iterdir()))
        created = [path for path in (root, *root.parents) if not path.exists()] if free else None
        outer = governing(root)
        make_folders(within(root, outer) if outer is not None else root, outer)
        _jobs[-1].append(folder := OwnedFolder.create(steps.real(root), Path(os.path.abspath(root))))
        folder.created = created
        return folder


@contextmanager
def writing(root: Path | None) -> Iterator[None]:
    """As `enter`, for a while, unless a job writes there already; where there is no folder, nothing. After an error before
    anything was written, nothing is left."""
    with job() as folders:
        if root is not None and governing(root) is None:
            enter(root)
        try:
            yield
        except Exception:
            withdraw(folders)
            raise


def withdraw(folders: list[OwnedFolder], beforehand: Container[str] = ()) -> None:
    """Remove what a job has written, and the folders that it created, if they were empty before and nothing else than
    `beforehand` was written."""
    with suppress(OSError, UserError):  # of a disk on which nothing can be changed any more
        for folder in folders:
            if folder.created is None or not folder.root.exists():
                continue
            contents = folder.survey()
            if all(path.relative_to(folder.root).as_posix() in beforehand for path in contents.files):
                folder.clear(contents)
                for path in folder.created:
                    path.rmdir()


def check_ours(*paths: Path) -> None:
    """Raise UserError, before the work that leads to them, for files or folders that are there and are not ours."""
    for path in paths:
        folder = governing(path)
        with saying(path):
            if folder is None:
                refuse([path] if os.path.lexists(path) else [])
            else:
                refuse(folder.others(within(path, folder)))


def governing(path: Path) -> OwnedFolder | None:
    """The innermost folder of a running job in which `path` lies by its name, or which it is."""
    named, real = Path(os.path.abspath(path)), steps.real(path)
    each = [folder for folders in _jobs for folder in folders]
    below = [f for f in each if named.is_relative_to(f.root) or named.is_relative_to(f.alias) or real.is_relative_to(f.root)]
    return max(below, key=lambda folder: len(folder.root.parts), default=None)


def put(path: str | Path, content: bytes, *, own: Callable[[bytes], bool] | None = None) -> None:
    """Write a file, so that a reader sees the old content or the new. What is there is replaced if it is ours: by the record of
    the folder of a running job, else if `own` says so of its content. A link to a file is followed, the mode of a file is kept.
    Raises UserError for the user's file, and where the system refuses."""
    path = Path(path)
    with saying(path):
        folder = governing(path)
        place = within(path, folder) if folder is not None else path.resolve()
        before = _content(place)
        if before is not None and not (folder.owns(place) if folder is not None else own is not None and own(before)):
            refuse([path])
        if before == content:
            return
        make_folders(place.parent, folder)
        if folder is None and own is not None:
            _sweep_files(place, own)
        hidden = steps.hidden_name(place)
        if folder is not None:
            folder.note(place, hidden, digest=hashlib.sha256(content).hexdigest())
        try:
            if before is None:
                steps.create(place, content, hidden)
            else:
                steps.create(hidden, content, hidden, mode=stat.S_IMODE(place.stat().st_mode))
                steps.install(hidden, place, before)
        except FileExistsError:
            refuse([path])
        finally:
            hidden.unlink(missing_ok=True)


def _sweep_files(place: Path, own: Callable[[bytes], bool]) -> None:
    """Remove what killed writers of a file have left beside it: whole, under a hidden name, and ours by its content."""
    for other in place.parent.iterdir():
        named = steps.is_hidden(other, place) and not other.is_symlink()
        if named and (content := _content(other)) is not None and own(content):
            other.unlink(missing_ok=True)


def _content(path: Path) -> bytes | None:
    """None where there is nothing. Raises UserError for what is no file."""
    if not os.path.lexists(path):
        return None
    if path.is_dir() or not path.is_file() or path.is_symlink():
        raise UserError(f"cannot write {path}: it is no file")
    return path.read_bytes()


def note_down(root: Path, name: str, value: str) -> None:
    """Note something about the folder `root`, if a job writes it."""
    folder = governing(root)
    if folder is not None and folder.root == steps.real(root):
        folder.remark(name, value)


def noted(root: Path, name: str) -> str | None:
    """What was noted about a folder; None if nothing was, or its record cannot be read."""
    try:
        folder = OwnedFolder.of(steps.real(root))
    except UserError:
        return None
    return None if folder is None else folder.notes.get(name)


def remove(path: Path) -> None:
    """Remove a file or a folder of ours within the folder of a running job, if it is there. Raises UserError, and removes
    nothing, if anything in it is not ours."""
    folder = governing(path)
    with saying(path, "remove"):
        if folder is not None:
            folder.remove(within(path, folder))
        elif os.path.lexists(path):
            refuse([path])


def tidy(path: Path) -> list[Path]:
    """Remove what is ours of a file or a folder within the folder of a running job, and return what stays: the user's."""
    folder = governing(path)
    with saying(path, "remove"):
        return [path] if folder is None else folder.tidy(within(path, folder))


def check_free(path: Path, *, overwrite: bool = True, what: str = "an earlier export") -> None:
    """Raise UserError unless a folder may be put at `path`: there is nothing, or an empty folder, or, with `overwrite`, one in
    which everything is ours and as it was written."""
    with saying(path):
        if not os.path.lexists(path):
            return
        place = steps.real(path)
        if Path.cwd().is_relative_to(place):
            raise UserError(f"{path} is the current folder, or holds it, and cannot be replaced; choose another place")
        if not place.exists():  # a link to where there is nothing yet
            return
        if not place.is_dir():
            raise UserError(f"{path} exists and is no folder; choose another place")
        if not any(place.iterdir()):
            return
        if (folder := OwnedFolder.of(place)) is None:
            first = min(file.name for file in place.iterdir())
            raise UserError(f"{path} exists and is not {what}: it holds '{first}', and no record of ours; choose another place")
        others = [file.relative_to(place).as_posix() for file in folder.survey().foreign]
        if others:
            more = f" and {len(others) - 1} more" if others[1:] else ""
            raise UserError(
                f"{path} holds '{others[0]}'{more}, which this toolkit did not write, or which was changed since; move that "
                "away or choose another place"
            )
        if not overwrite:
            raise UserError(f"{path} holds {what}: --overwrite replaces it (or choose another --out)")
