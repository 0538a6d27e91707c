"""Files and output folders: one-line errors, a reader sees the old content or the new one, and what is not ours stays as it is.

An output folder has a manifest, `.mamba-surgery.json`: the files that we wrote there with their digests, and the settings by
which each was made. A manifest is bound to its folder by the folder's inode, so that one which came with a download or a copy
gives no right to remove anything.
"""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from surgery.errors import UserError
from surgery.runtime.processes import is_main

MANIFEST = ".mamba-surgery.json"
LOCK = ".mamba-surgery.lock"
STAGING = ".mamba-surgery.new"
RECIPE = "recipe.yaml"  # of a run, which reads it on --resume: it may have been edited


def read_text(path: str | Path) -> str:
    """A UTF-8 file. Raises UserError where it cannot be read."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise UserError(f"cannot read {path}: it is {'a folder' if Path(path).is_dir() else 'no file'}")
        return Path(path).read_text(encoding="utf-8-sig")  # without the mark that some editors put before the text
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not UTF-8 at byte {error.start}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file beside the old one, then put it in its place. Raises UserError where that cannot be done."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(beside, 0o666 & ~_umask())
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def file_digest(path: str | Path) -> str:
    """sha256 of a file, or of a folder: of the names and digests of all files in it but compiled Python."""
    path = Path(path)
    if path.is_dir():
        names = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
        listing = [f"{name} {file_digest(path / name)}" for name in names if "__pycache__" not in name.parts]
        return hashlib.sha256("\n".join(listing).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settings_digest(settings: Any) -> str:
    """sha256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def refuse_inputs(out: str | Path, inputs: Iterable[str | Path]) -> None:
    """Raise UserError where an output is, or holds, an input of the same command, links resolved, or is a link to nothing."""
    if Path(out).is_symlink() and not Path(out).exists():
        raise UserError(f"--out {out} is a link that leads nowhere; remove it, or choose another --out")
    place = Path(os.path.realpath(out))
    for given in inputs:
        path = Path(os.path.realpath(given))
        if path.exists() and (path == place or place in path.parents):
            what = "is" if path == place else "holds"
            raise UserError(f"--out {out} {what} {given}, which this command reads; choose another --out")


def check_output_file(out: str | Path, inputs: Iterable[str | Path], *, overwrite: bool, marks: Iterable[str] = ()) -> None:
    """Raise UserError unless one file may be written. marks: keys that an earlier one has, which --overwrite may replace."""
    out = Path(out)
    refuse_inputs(out, inputs)
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file, e.g. {out / 'ranking.json'}")
    if out.exists():
        if not overwrite:
            raise UserError(f"{out} is there already; --overwrite replaces it")
        try:
            ours = set(marks) <= set(json.loads(read_text(out)))
        except (ValueError, TypeError, RecursionError):
            ours = False
        if not ours:
            raise UserError(f"{out} was not written by this command, so it is not replaced; choose another --out")
    _check_writable(out.parent)


def _check_writable(folder: Path, make: bool = False) -> None:
    """Raise UserError where nothing can be written to a folder, or to that in which it would be made. make: make it."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        folder = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error


class OutputFolder(AbstractContextManager["OutputFolder"]):
    """A folder that one command writes to; made by open_output, used within a `with`."""

    def __init__(self, path: Path, lock: int | None, *, new: Iterable[Path] = (), empty: bool = False):
        self.path = path
        self._lock, self._new, self._empty = lock, new, empty
        self._files: dict[str, str] = {}
        self._made_by: dict[str, str] = {}
        self._open: dict[str, list[str]] = {}  # folders that are being filled -> the files there that are not ours

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is None:
            return
        nothing = kind is not None and {each.name for each in self.path.iterdir()} <= {MANIFEST, LOCK}
        if nothing and self._empty:
            (self.path / MANIFEST).unlink(missing_ok=True)
        (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None
        for folder in self._new if nothing else ():
            with suppress(OSError):  # another run is there already
                folder.rmdir()

    def write(self, name: str, text: str, settings: Any = None) -> Path:
        """Write one of our files. settings: what it depends on, which `is_made` compares."""
        path = self.path / name
        self._refuse_foreign(name)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._save(moving={name: digest})  # so that a run which is killed now knows next time that this is ours
        write_text(path, text)
        self._files[name] = digest
        self._made_by[name] = settings_digest(settings)
        self._save()
        return path

    def is_made(self, name: str, settings: Any) -> bool:
        """Whether an earlier run wrote this file with the same settings, and nobody changed it since."""
        path = self.path / name
        same = self._made_by.get(name) == settings_digest(settings) and path.is_file()
        return same and file_digest(path) == self._files.get(name)

    @contextmanager
    def folder(self, name: str, settings: Any = None) -> Iterator[Path]:
        """A folder below this one that is filled over a long time, and kept if the work is cut short; with other settings than
        before it begins empty. What is new in it becomes ours."""
        path = self.path / name
        if self._lock is None:  # the main process does what follows
            yield path
            return
        if settings is not None and self._made_by.get(name) != settings_digest(settings):
            self.remove([file for file in self._files if file.startswith(f"{name}/")])
        self._made_by[name] = settings_digest(settings)
        self._open[name] = [file for file in self._below(name) if file not in self._files]
        self._save()
        path.mkdir(parents=True, exist_ok=True)
        yield path
        self._claim(name, self._open.pop(name))
        self._save()

    @contextmanager
    def new_folder(self, name: str, settings: Any = None, *, keep: bool = False) -> Iterator[Path]:
        """A folder to fill out of sight; if the work succeeds, its files take the place of ours in the folder `name` ("." for
        this folder itself), and otherwise everything is as before. keep: files of ours that are not in it stay."""
        staging, target = self.path / STAGING, self.path / name
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            yield staging
            files = [path.relative_to(staging) for path in sorted(staging.rglob("*")) if path.is_file()]
            new = {(Path(name) / file).as_posix(): file_digest(staging / file) for file in files}
            for each in new:
                self._refuse_foreign(each)
            old = [each for each in self._files if each not in new and (name == "." or each.startswith(f"{name}/"))]
            self._save(moving=new)  # so that a run which is killed now knows next time that these are ours
            self.remove([] if keep else old)
            for file in files:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                os.chmod(staging / file, 0o666 & ~_umask())  # some libraries write files that others may not read
                os.replace(staging / file, target / file)
            self._files |= new
            self._made_by |= dict.fromkeys([name, *new], settings_digest(settings))
            self._save()
        except OSError as error:
            raise UserError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def clear(self) -> None:
        """Remove all that an earlier run wrote here."""
        if self._lock is None:  # the main process does it
            return
        self.remove(list(self._files))
        self._made_by = {}
        self._save()

    def _refuse_foreign(self, name: str) -> None:
        if name not in self._files and (self.path / name).exists():
            raise UserError(f"{self.path / name} was not written by this toolkit, so it is not replaced; move it away")
        self._removable([name])

    def _below(self, name: str) -> list[str]:
        """The files in a folder."""
        found = (path for path in sorted((self.path / name).rglob("*")) if path.is_file() and not path.is_symlink())
        return [path.relative_to(self.path).as_posix() for path in found]

    def _claim(self, name: str, foreign: Iterable[str]) -> None:
        """What is in a folder is ours, but for these files."""
        self._files |= {file: file_digest(self.path / file) for file in self._below(name) if file not in set(foreign)}

    def _save(self, moving: dict[str, str] | None = None) -> None:
        held = {"folder": os.stat(self.path).st_ino, "files": self._files, "settings": self._made_by, "open": self._open}
        held |= {"moving": moving or {}}
        write_text(self.path / MANIFEST, json.dumps(held, indent=1) + "\n")

    def _read(self) -> None:
        """Take over what an earlier run left. Raises UserError for a manifest that is not this folder's."""
        text = read_text(self.path / MANIFEST)
        try:
            held = json.loads(text)
            inode, moving = held["folder"], dict(held["moving"])
            opened = {name: list(foreign) for name, foreign in dict(held["open"]).items()}
            self._files, self._made_by = dict(held["files"]), dict(held["settings"])
            names = [Path(name) for name in (*self._files, *opened, *moving)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{self.path / MANIFEST} is damaged; choose another --out") from error
        if inode != os.stat(self.path).st_ino or any(
            name.is_absolute() or ".." in name.parts or not name.parts for name in names
        ):
            raise UserError(f"{self.path} is a copy of a folder that was written elsewhere; choose another --out")
        for name, foreign in opened.items():
            self._claim(name, foreign)
        arrived = {name: digest for name, digest in moving.items() if (self.path / name).is_file()}
        self._files |= {name: digest for name, digest in arrived.items() if file_digest(self.path / name) == digest}

    def _removable(self, names: Iterable[str]) -> list[str]:
        """Those that are there. Raises UserError for a file of ours that was changed since, that may not be removed, or whose
        folder is a link to elsewhere now."""
        names, place = [name for name in names if (self.path / name).is_file()], self.path.resolve()
        for name in names:
            if place not in (parent := (self.path / name).parent.resolve(), *parent.parents):
                raise UserError(
                    f"{self.path / name} is elsewhere, {parent}, by a link; remove the link, or choose another --out"
                )
            if file_digest(self.path / name) != self._files[name]:
                raise UserError(
                    f"{self.path / name} was changed since this toolkit wrote it; move it away, or choose another --out"
                )
            if not os.access((self.path / name).parent, os.W_OK):
                raise UserError(f"cannot write to {(self.path / name).parent}: Permission denied")
        return names

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of ours that are as we wrote them, and folders that are empty then. Raises UserError, before anything is
        removed, for one that was changed since."""
        names = self._removable(names)
        for name in names:
            (self.path / name).unlink()
        parents = {parent for name in names for parent in Path(name).parents if parent != Path()}
        for parent in sorted(parents, key=lambda each: -len(each.parts)):
            if not any((self.path / parent).iterdir()):
                (self.path / parent).rmdir()
        for name in list(self._files):
            if not (self.path / name).exists():
                self._files.pop(name)


def check_output(
    folder: str | Path, inputs: Iterable[str | Path] = (), *, resume: bool | None = None, overwrite: bool = False
) -> bool:
    """Raise UserError where open_output would, before any work, and write nothing. Whether an earlier run's files are there."""
    path = Path(folder)
    if resume and overwrite:
        raise UserError("--resume goes on with an earlier run, and --overwrite removes it; give one of them")
    refuse_inputs(path, inputs)
    if path.exists() and not path.is_dir():
        raise UserError(f"--out {path} is a file; name a folder")
    if not is_main():
        return False
    present = path.is_dir() and {each.name for each in path.iterdir()} - {LOCK, STAGING}
    if present and MANIFEST not in present:
        raise UserError(
            f"--out {path} holds files that are not ours ({min(present)}); choose another --out, or an empty folder"
        )
    place = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not place.is_dir():
        raise UserError(f"cannot write to {path}: {place} is a file")
    _check_writable(place)
    if (path / LOCK).exists():
        os.close(_take_lock(path))
    if present and present != {MANIFEST} and not (resume or overwrite):
        goes_on = "" if resume is None else "--resume goes on with it, "
        raise UserError(f"--out {path} holds an earlier run: {goes_on}--overwrite begins anew")
    return bool(present)


def open_output(
    folder: str | Path, inputs: Iterable[str | Path] = (), *, resume: bool | None = None, overwrite: bool = False
) -> OutputFolder:
    """An output folder, locked until its `with` ends.

    inputs: what the command reads. resume: go on with an earlier run there; None where the command cannot. overwrite: what it
    wrote may be replaced. Raises UserError, before anything is changed, where the folder is or holds an input, holds an earlier
    run or files that are not ours, is being written to by another run, or cannot be written to.
    """
    path = Path(folder)
    present = check_output(path, inputs, resume=resume, overwrite=overwrite)
    if not is_main():
        return OutputFolder(path, None)
    new = [each for each in (path, *path.parents) if not each.exists()]
    _check_writable(path, make=True)
    output = OutputFolder(path, _take_lock(path), new=new, empty=not present)
    try:
        if present:
            output._read()
        shutil.rmtree(path / STAGING, ignore_errors=True)
        if not overwrite and (path / RECIPE).is_file() and RECIPE in output._files:
            output._files[RECIPE] = file_digest(path / RECIPE)
        output._removable(output._files)
        output._save()
    except BaseException as error:
        output.__exit__(type(error), error, None)
        raise
    return output


def _take_lock(folder: Path) -> int:
    """Lock a folder for this process; the system releases it if the process dies. Raises UserError that names the holder."""
    path = folder / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be locked ({error.strerror}); move it away, or choose another --out") from error
    if (held := os.fstat(handle)).st_nlink > 1 or not stat.S_ISREG(held.st_mode):  # another file has this name
        os.close(handle)
        raise UserError(f"{path} is no lock of ours; move it away, or choose another --out")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(handle, 500).decode(errors="replace").strip()
        os.close(handle)
        raise UserError(f"--out {folder} is in use by another run ({holder}); wait for it, or choose another --out") from error
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()}: {shlex.join(sys.argv)[:400]}\n".encode(errors="replace"))
    return handle
