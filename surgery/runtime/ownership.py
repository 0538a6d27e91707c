"""Which files are ours, decided in one place: this toolkit replaces and removes what it wrote itself, and nothing else.

A folder that we write into holds a record, the file `.mamba-surgery`. It names every file that we wrote there, literally, with
the sha256 of its content, and every folder that we made. Each line carries a seal of its own. A file that the record does not
name is the user's. So is a file whose content is another than the recorded one, and every link. The user's files are never
replaced, removed, renamed or moved: they are named in an error, before the work begins and once more before anything is
exchanged. A record with a line that does not fit its seal grants nothing and is refused.

A line is written before the file that it names. So a process that is killed leaves no file of ours without its line, and a line
without a file does no harm. Files get their name when they are complete, and folders that are built as a whole are built
beside their place, so that a reader sees the old content or the new. A file that stands alone, where there is no record, is
replaced only if its writer knows its content as its own (records.record.Marked).
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from surgery.errors import UserError

RECORD = ".mamba-surgery"
VERSION = 1
AT_FDCWD, EXCHANGE_LINUX, EXCHANGE_MACOS = -100, 2, 2  # of linux/fcntl.h, linux/fs.h and sys/stdio.h
# What is written while a folder is built: where a process was killed before it could note what a file holds, these are ours by
# name, within the very folder that it made. The pattern: parts of large weights, safetensors' temporary file, modeling code.
EXPECTED = {
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "adapter_config.json", "adapter_model.safetensors",
    "trained.safetensors", "best.safetensors", "optimizer.pt", "state.json", "patch.safetensors", "model.gguf", "README.md",
    "train.tokens", "held-out.tokens", "corpus.json", "plan.json", "base.json", "patch.json", "export.json", "recipe.yaml",
    "log.jsonl", "measured.json", "report.json", "report.html", "sites.png", "retrieval.png", "atlas.png",
}  # fmt: skip
HIDDEN = re.compile(r"-new-[0-9a-f]{8}$")
PARTS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|\.tmp[A-Za-z0-9]{6}|[a-z0-9_]+\.py")


@dataclass
class Survey:
    """What a folder holds. files, folders: ours, as they were written; folders from the outermost on. foreign: the user's,
    whether we never wrote them or they were changed since; of a folder that is not ours, the folder alone."""

    files: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)

    def all(self) -> list[Path]:
        return [*self.files, *self.folders, *self.foreign]


class OwnedFolder:
    """A folder with a record, and what the record says. Several processes may add to it.

    root: without links. alias: what it is also called, by whoever writes there. files: by name, the digests of all contents
    that it was given. folders: those that we made. created: of a job's folder that was empty, which folders of its path the job
    has made.
    """

    def __init__(self, root: Path, alias: Path | None = None):
        self.root, self.alias = root, alias or root
        self.files: dict[str, set[str]] = {}
        self.folders: set[str] = set()
        self._hidden: set[tuple[str, str, int]] = set()  # "building", ...; the hidden name that it had or gets; its inode
        self.notes: dict[str, str] = {}
        self._token = ""
        self._offset = 0
        self.created: list[Path] | None = None
        self._read()

    @classmethod
    def of(cls, root: Path) -> "OwnedFolder | None":
        """The folder `root`, if it has a record. Raises UserError for a damaged one."""
        return cls(root) if os.path.lexists(root / RECORD) else None

    @classmethod
    def create(cls, root: Path, alias: Path | None = None, hidden: str | None = None) -> "OwnedFolder":
        """Give the folder `root` a record, unless it has one. hidden: as for `hide`, of its present name."""
        token = secrets.token_hex(8)
        if not os.path.lexists(root / RECORD):
            lines = _sealed({"mamba-surgery": VERSION, "token": token}, token)
            if hidden is not None:
                lines += _sealed({"hidden": hidden, "name": root.name, "inode": root.stat().st_ino}, token)
            with suppress(FileExistsError):  # another process was quicker
                _create(root / RECORD, lines)
        return cls(root, alias)

    def remark(self, name: str, value: str) -> None:
        """Note something that concerns this machine alone: the record is not published."""
        if self.notes.get(name) != value:
            self._write(_sealed({"note": name, "value": value}, self._token))

    def hide(self, state: str, name: str) -> None:
        """Note that the folder has, or gets, a hidden name: while it is "building", when another takes its place ("leaving"),
        or when it is removed ("removing"). It says so of this folder alone, and not of a copy."""
        self._write(_sealed({"hidden": state, "name": name, "inode": self.root.stat().st_ino}, self._token))

    def hidden(self, state: str) -> bool:
        """Whether the folder is in such a state."""
        return (state, self.root.name, self.root.stat().st_ino) in self._hidden

    def note(self, *paths: Path, digest: str | None = None) -> None:
        """Write down that files are ours (digest: of the content of the one that is about to be written), and folders."""
        lines = []
        for path in paths:
            name = path.relative_to(self.root).as_posix()
            if digest is None and path.is_dir():
                if name not in self.folders:
                    lines.append(_sealed({"folder": name}, self._token))
                continue
            sha256 = digest or _digest(path)
            if sha256 not in self.files.get(name, ()):
                lines.append(_sealed({"file": name, "sha256": sha256}, self._token))
        if lines:
            self._write(b"".join(lines))

    def note_folder(self, path: Path) -> None:
        """Write down that a folder that is about to be made is ours."""
        if (name := path.relative_to(self.root).as_posix()) not in self.folders:
            self._write(_sealed({"folder": name}, self._token))

    def left(self, path: Path) -> bool:
        """Whether a file or folder has a hidden name of ours, as killed writers leave them."""
        name = path.relative_to(self.root).as_posix()
        return (name in self.files or name in self.folders) and HIDDEN.search(path.name) is not None

    def made(self, path: Path) -> bool:
        """Whether we made a folder."""
        self._read()
        name = _within(path, self).relative_to(self.root).as_posix()
        return name in self.folders and path.is_dir() and not path.is_symlink()

    def owns(self, path: Path) -> bool:
        """Whether a file is ours, and as it was written."""
        self._read()
        known = self.files.get(path.relative_to(self.root).as_posix())
        return bool(known) and not path.is_symlink() and path.is_file() and _digest(path) in known  # type: ignore[operator]

    def survey(self) -> Survey:
        """All that is in the folder, but the record. Raises UserError for a damaged record in a folder below."""
        self._read()
        contents = Survey()
        self._look(self.root, contents)
        return contents

    def _look(self, place: Path, contents: Survey) -> None:
        with os.scandir(place) as entries:
            each = sorted(entries, key=lambda entry: entry.name)
        for entry in each:
            path = Path(entry.path)
            name = path.relative_to(self.root).as_posix()
            if name == RECORD and not entry.is_symlink():
                continue
            if entry.is_dir(follow_symlinks=False) and name in self.folders:
                contents.folders.append(path)
                if (inner := OwnedFolder.of(path)) is None:
                    self._look(path, contents)
                else:
                    inner._look(path, contents)
            elif entry.is_file(follow_symlinks=False) and (self._expects(path) or self.owns(path)):
                contents.files.append(path)
            else:
                contents.foreign.append(path)

    def _expects(self, path: Path) -> bool:
        return (path.name in EXPECTED or PARTS.fullmatch(path.name) is not None) and self.hidden("building")

    def clear(self, contents: Survey | None = None) -> list[Path]:
        """Remove what is ours (contents: by a survey of a moment ago), the record last, and the
        folder itself not. Returns what stays: the user's."""
        contents = contents or self.survey()
        for path in contents.files:
            path.unlink(missing_ok=True)
        _remove_folders(contents)
        if not contents.foreign:
            (self.root / RECORD).unlink(missing_ok=True)
        return contents.foreign

    def remove(self, path: Path) -> None:
        """Remove a file or a folder of ours, if it is there. A folder loses its name first, so that no part of it ever has it.
        Raises UserError, and removes nothing, where it holds what is not ours."""
        contents = self._below(path)
        refuse(contents.foreign)
        if path in contents.folders:
            hidden = _hidden_name(path)
            self.note_folder(hidden)
            OwnedFolder.create(path).hide("removing", hidden.name)
            os.rename(path, hidden)
            if others := OwnedFolder(hidden).survey().foreign:
                os.rename(hidden, path)
                refuse(path / other.relative_to(hidden) for other in others)
            OwnedFolder(hidden).clear()
            hidden.rmdir()
        for file in contents.files:
            file.unlink(missing_ok=True)

    def others(self, path: Path) -> list[Path]:
        """What of a file or a folder is the user's."""
        return self._below(path).foreign

    def tidy(self, path: Path) -> list[Path]:
        """Remove what is ours of a file or a folder, and return what stays: the user's. A folder with a record of its own, an
        export for one, is seen whole or not at all."""
        contents = self._below(path)
        if path in contents.folders and not contents.foreign and (path / RECORD).is_file():
            self.remove(path)
            return []
        for file in contents.files:
            file.unlink(missing_ok=True)
        _remove_folders(contents)
        return contents.foreign

    def _below(self, path: Path) -> Survey:
        """A survey of a file, or of a folder and all that is in it."""
        contents = Survey()
        if not os.path.lexists(path):
            return contents
        if path.is_dir() and not path.is_symlink() and path.relative_to(self.root).as_posix() in self.folders:
            contents.folders.append(path)
            (OwnedFolder.of(path) or self)._look(path, contents)
        elif self.owns(path):
            contents.files.append(path)
        else:
            contents.foreign.append(path)
        return contents

    def _write(self, lines: bytes) -> None:
        descriptor = os.open(self.root / RECORD, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        try:
            _append(descriptor, lines)
        finally:
            os.close(descriptor)
        self._read()

    def _read(self) -> None:
        """Read what was added since the last time."""
        place = self.root / RECORD
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise UserError(f"cannot read {place}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]  # a process may have been killed, or the disk full, within a line
        for line in whole.splitlines():
            self._take(line, place)
        if not self._offset and not whole:
            raise _damaged(place)
        self._offset += len(whole)

    def _take(self, line: bytes, place: Path) -> None:
        try:
            entry = json.loads(line)
            seal = entry.pop("seal")
            self._token = self._token or entry["token"]
            if seal != _seal(entry, self._token):
                raise ValueError
            if "mamba-surgery" in entry:
                if entry["mamba-surgery"] != VERSION:
                    raise ValueError
                return
            if "note" in entry:
                self.notes[str(entry["note"])] = str(entry["value"])
                return
            if "hidden" in entry:
                self._hidden.add((entry["hidden"], entry["name"], entry["inode"]))
                return
            name = entry["file"] if "file" in entry else entry["folder"]
            if not _inside(name):
                raise ValueError
            if "file" in entry:
                self.files.setdefault(name, set()).add(str(entry["sha256"]))
            else:
                self.folders.add(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(place) from error


def _remove_folders(contents: Survey) -> None:
    """Those that are empty by now."""
    for path in reversed(contents.folders):
        if not any(path in other.parents for other in contents.foreign):
            (path / RECORD).unlink(missing_ok=True)
        with suppress(OSError):  # the user's files are in it
            path.rmdir()


def _damaged(place: Path) -> UserError:
    return UserError(
        f"{place} is damaged, or was not written by this toolkit: it is not known what in {place.parent} is ours; nothing "
        "there is changed; choose another place"
    )


def _inside(name: object) -> bool:
    """Whether it names something below a folder, and not the record."""
    return isinstance(name, str) and name != RECORD and not {*name.split("/")} & {"", ".", ".."}


def _seal(entry: dict[str, object], token: str) -> str:
    return hashlib.sha256(f"{token} {json.dumps(entry, sort_keys=True)}".encode()).hexdigest()[:32]


def _sealed(entry: dict[str, object], token: str) -> bytes:
    return json.dumps(entry | {"seal": _seal(entry, token)}).encode() + b"\n"


def _append(descriptor: int, lines: bytes) -> None:
    """Add whole lines or nothing. What another process left of a line goes first."""
    size = os.fstat(descriptor).st_size
    with suppress(OSError):  # the first lines of a file that is only written to
        tail = os.pread(descriptor, min(size, 65536), max(0, size - 65536))
        torn = len(tail) - tail.rfind(b"\n") - 1
        if torn and tail:
            size -= torn
            os.ftruncate(descriptor, size)
    written = 0
    try:
        while written < len(lines):
            written += os.write(descriptor, lines[written:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse(foreign: Iterable[Path]) -> None:
    """Raise UserError, naming the first, if there are files of the user's."""
    if others := sorted(foreign):
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise UserError(
            f"'{others[0]}'{more} was not written by this toolkit, or was changed since: it is neither replaced nor removed; "
            "move it away, or choose another place"
        )


# ---- where files go

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
        _make_folders(_within(root, outer) if outer is not None else root, outer)
        _jobs[-1].append(folder := OwnedFolder.create(_real(root), Path(os.path.abspath(root))))
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
                refuse(folder.others(_within(path, folder)))


def governing(path: Path) -> OwnedFolder | None:
    """The innermost folder of a running job in which `path` lies by its name, or which it is."""
    named, real = Path(os.path.abspath(path)), _real(path)
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
        place = _within(path, folder) if folder is not None else path.resolve()
        before = _content(place)
        if before is not None and not (folder.owns(place) if folder is not None else own is not None and own(before)):
            refuse([path])
        if before == content:
            return
        _make_folders(place.parent, folder)
        if folder is None and own is not None:
            _sweep_files(place, own)
        hidden = _hidden_name(place)
        if folder is not None:
            folder.note(place, hidden, digest=hashlib.sha256(content).hexdigest())
        try:
            if before is None:
                _create(place, content, hidden)
            else:
                _create(hidden, content, hidden, mode=stat.S_IMODE(place.stat().st_mode))
                _install(hidden, place, before)
        except FileExistsError:
            refuse([path])
        finally:
            hidden.unlink(missing_ok=True)


def _sweep_files(place: Path, own: Callable[[bytes], bool]) -> None:
    """Remove what killed writers of a file have left beside it: whole, under a hidden name, and ours by its content."""
    for other in place.parent.iterdir():
        named = other.name.startswith(f".{place.name[:200]}-new-") and HIDDEN.search(other.name) and not other.is_symlink()
        if named and (content := _content(other)) is not None and own(content):
            other.unlink(missing_ok=True)


def note_down(root: Path, name: str, value: str) -> None:
    """Note something about the folder `root`, if a job writes it."""
    folder = governing(root)
    if folder is not None and folder.root == _real(root):
        folder.remark(name, value)


def noted(root: Path, name: str) -> str | None:
    """What was noted about a folder; None if nothing was, or its record cannot be read."""
    try:
        folder = OwnedFolder.of(_real(root))
    except UserError:
        return None
    return None if folder is None else folder.notes.get(name)


def remove(path: Path) -> None:
    """Remove a file or a folder of ours within the folder of a running job, if it is there. Raises UserError, and removes
    nothing, if anything in it is not ours."""
    folder = governing(path)
    with saying(path, "remove"):
        if folder is not None:
            folder.remove(_within(path, folder))
        elif os.path.lexists(path):
            refuse([path])


def tidy(path: Path) -> list[Path]:
    """Remove what is ours of a file or a folder within the folder of a running job, and return what stays: the user's."""
    folder = governing(path)
    with saying(path, "remove"):
        return [path] if folder is None else folder.tidy(_within(path, folder))


def check_free(path: Path, *, overwrite: bool = True, what: str = "an earlier export") -> None:
    """Raise UserError unless a folder may be put at `path`: there is nothing, or an empty folder, or, with `overwrite`, one in
    which everything is ours and as it was written."""
    with saying(path):
        if not os.path.lexists(path):
            return
        place = _real(path)
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
        if not _exchange(self.place, self.path):
            aside = _hidden_name(self.path)
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
            _make_folders(target / folder.relative_to(self.place), there)
        self._modes(contents)
        for path, new in names.items():
            there.note(new, digest=_digest(path))
            _install(path, new, None if not os.path.lexists(new) else _digest(new))
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
    path = _within(path, governor) if governor is not None else _real(path)
    _make_folders(path.parent, governor)
    _sweep_beside(path)
    place = _hidden_name(path)
    if governor is not None:
        governor.note_folder(place)
    place.mkdir()
    lock = _lock(place)
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
        beside = [place for place in path.parent.iterdir() if place.name.startswith(f".{path.name[:200]}-new-")]
    except OSError:
        return
    for place in beside:
        with suppress(UserError, OSError):  # not ours, by its record; or its builder lives
            if place.is_symlink() or HIDDEN.search(place.name) is None:
                continue
            if (folder := OwnedFolder.of(place)) is None:
                place.rmdir()  # which the system refuses unless it is empty
                continue
            if not any(map(folder.hidden, ("building", "leaving", "removing"))):
                continue
            lock = _lock(place, wait=False)
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
        if HIDDEN.search(path.name) and folder.owns(path):
            path.unlink(missing_ok=True)
    for path in (folder.root / name for name in folder.folders):
        if (named := HIDDEN.search(path.name)) is not None:
            _sweep_beside(path.with_name(path.name[1 : named.start()]))


def reason(error: Exception) -> str:
    """Why something could not be written, in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())


@contextmanager
def saying(path: str | Path, doing: str = "write") -> Iterator[None]:
    """An error of the system becomes one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {doing} {path}: {reason(error)}") from error


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _within(path: Path, folder: OwnedFolder) -> Path:
    """A path below a job's folder, without links: we make none there, so one is the user's, and leads elsewhere."""
    parent, inside = Path(os.path.abspath(path)), list[str]()
    while parent not in (folder.root, folder.alias) and (parent.is_symlink() or _real(parent) != folder.root):
        if parent.is_symlink():
            raise UserError(f"{parent} is a link, which is not followed here; move it away")
        inside.append(parent.name)
        parent = parent.parent
    return folder.root.joinpath(*reversed(inside))


def _content(path: Path) -> bytes | None:
    """None where there is nothing. Raises UserError for what is no file."""
    if not os.path.lexists(path):
        return None
    if path.is_dir() or not path.is_file() or path.is_symlink():
        raise UserError(f"cannot write {path}: it is no file")
    return path.read_bytes()


def _make_folders(path: Path, folder: OwnedFolder | None) -> None:
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for new in reversed(missing):
        if folder is not None and new.is_relative_to(folder.root) and new != folder.root:
            folder.note_folder(new)
        new.mkdir(exist_ok=True)


def _hidden_name(path: Path) -> Path:
    """Where something is until it is complete."""
    return path.with_name(f".{path.name[:200]}-new-{secrets.token_hex(4)}")


def _create(path: Path, content: bytes, hidden: Path | None = None, mode: int | None = None) -> None:
    """Make a file that is complete when it gets its name. hidden: what it is called until then, where the system gives every
    file a name from the first byte on. mode: unless the user's umask decides. Raises FileExistsError if there is one."""
    hidden = hidden or _hidden_name(path)
    descriptor = None
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # a file system without files that have no name
            descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    unnamed = descriptor is not None
    if descriptor is None:
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if mode is not None:
            os.fchmod(descriptor, mode)
        if unnamed:
            folder = os.open(path.parent, os.O_RDONLY)
            try:  # src_dir_fd has no effect on an absolute path, but makes Python call linkat, which can follow this link
                os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
        elif hidden != path:
            _install(hidden, path, None)
    finally:
        os.close(descriptor)
        if not unnamed and hidden != path:
            hidden.unlink(missing_ok=True)


def _install(source: Path, target: Path, expected: bytes | str | None) -> None:
    """Give the complete file `source` the name `target`. expected: what is there, its bytes or their sha256; None: nothing.
    Raises UserError (FileExistsError where nothing was expected), both as they were, if there is something else by now."""

    def fits(path: Path) -> bool:
        return (path.read_bytes() if isinstance(expected, bytes) else _digest(path)) == expected

    if expected is None:
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError as error:  # a file system without links
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            os.rename(source, target)
    elif _exchange(source, target):
        if not fits(source):
            _exchange(source, target)
            refuse([target])
    else:
        if not fits(target):
            refuse([target])
        os.replace(source, target)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two files or folders in one step; False where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    a, b = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin" and (call := getattr(library, "renamex_np", None)) is not None:
        done = call(a, b, EXCHANGE_MACOS)
    elif (call := getattr(library, "renameat2", None)) is not None:
        done = call(AT_FDCWD, a, AT_FDCWD, b, EXCHANGE_LINUX)
    else:
        return False
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number))


def _lock(path: Path, *, wait: bool = True) -> int | None:
    """A descriptor that holds the lock of a folder; None where the file system knows no locks. Raises OSError if another
    process has it and `wait` is not set."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES) and not wait:
            raise
        return None
    return descriptor
