"""A folder with a record of what in it is ours."""

import hashlib
import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from surgery.errors import UserError
from surgery.runtime.ownership import steps
from surgery.runtime.ownership.complaints import refuse

RECORD = ".mamba-surgery"
VERSION = 1
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
                steps.create(root / RECORD, lines)
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
            sha256 = digest or steps.digest_of(path)
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
        return (name in self.files or name in self.folders) and steps.HIDDEN.search(path.name) is not None

    def made(self, path: Path) -> bool:
        """Whether we made a folder."""
        self._read()
        name = within(path, self).relative_to(self.root).as_posix()
        return name in self.folders and path.is_dir() and not path.is_symlink()

    def owns(self, path: Path) -> bool:
        """Whether a file is ours, and as it was written."""
        self._read()
        known = self.files.get(path.relative_to(self.root).as_posix())
        return bool(known) and not path.is_symlink() and path.is_file() and steps.digest_of(path) in known  # type: ignore[operator]

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
            hidden = steps.hidden_name(path)
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
            steps.append_whole(descriptor, lines)
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


def within(path: Path, folder: OwnedFolder) -> Path:
    """A path below a job's folder, without links: we make none there, so one is the user's, and leads elsewhere."""
    parent, inside = Path(os.path.abspath(path)), list[str]()
    while parent not in (folder.root, folder.alias) and (parent.is_symlink() or steps.real(parent) != folder.root):
        if parent.is_symlink():
            raise UserError(f"{parent} is a link, which is not followed here; move it away")
        inside.append(parent.name)
        parent = parent.parent
    return folder.root.joinpath(*reversed(inside))


def make_folders(path: Path, folder: OwnedFolder | None) -> None:
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for new in reversed(missing):
        if folder is not None and new.is_relative_to(folder.root) and new != folder.root:
            folder.note_folder(new)
        new.mkdir(exist_ok=True)
