"""Files and folders that get their name only when they are complete, so that a reader sees the old content or the new.

Each is written under a hidden name beside its place, .NAME-new-XXXXXXXX, and then moved there in one step. The hidden one is
locked while its writer lives: what is not locked was left by a process that was killed, and is removed by the next writer of
the same name, or with all others below a folder by `sweep`. Where a file system knows no locks, it stays.

Linux exchanges two folders in one step (renameat2). Where a file system or another system cannot, there are two renames, and a
process killed between them leaves both folders whole under hidden names; `recover` puts the previous one back.
"""

import ctypes
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgery.errors import UserError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT)  # another process has the lock, or has removed it
TRIES = 100
HIDDEN = re.compile(r"\..+-new-[a-z0-9_]{8}", re.DOTALL)  # as tempfile names them


@contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """Yields where to write a file, which becomes `path` at the end; if an error is raised, nothing becomes it, and nothing is
    left. Raises UserError where the system refuses."""
    path = Path(path)
    temporary: Path | None = None
    try:
        temporary, lock = _hidden(path, _new_file)
        with _closing(lock):
            yield temporary
            temporary.chmod(0o644)  # a temporary file's default is for secrets
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """Yields a new folder to fill, beside `path`; `replace` may then put it there. If it is still where it was at the end, it
    is removed. Raises OSError where the system refuses."""
    recover(path)
    temporary, lock = _hidden(path, _new_folder)
    try:
        with _closing(lock):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace(source: Path, target: Path) -> None:
    """Put the folder `source` at `target`, in one step if the system can. What was there is gone afterwards; where the system
    refuses that (a disk that is read-only by now), it stays under a hidden name, which is said: `target` is complete, and the
    next writer of it, or `sweep`, removes what stayed."""
    aside = aside_of(target)
    if not target.exists():
        os.rename(source, target)
    elif _exchange(source, target):
        _discard(source, target)
    else:
        os.rename(target, aside)
        os.rename(source, target)
    _discard(aside, target)


def _discard(earlier: Path, target: Path) -> None:
    """Remove what was at `target` before, if anything was."""
    try:
        shutil.rmtree(earlier)
    except FileNotFoundError:
        return
    except OSError as error:
        shutil.rmtree(earlier, ignore_errors=True)  # what else there is of it
        if earlier.exists():
            from surgery.runtime.progress import say  # which brings a library for terminals

            say(f"{target} is complete; what was there before stays in {earlier} until the next call ({reason(error)})")


def remove(path: Path) -> None:
    """Remove a file or a folder. No part of a folder ever has its name, and it takes no room on a full disk."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    hidden = path.with_name(_beginning(path) + secrets.token_hex(4))
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def recover(path: Path) -> None:
    """Clear up after writers of the folder `path` that were killed, and put back what one of them had moved aside."""
    aside = aside_of(path)
    if aside.is_dir() and not aside.is_symlink():
        if not path.exists():
            os.rename(aside, path)
        shutil.rmtree(aside, ignore_errors=True)
    _sweep_beside(path)


def sweep(folder: Path) -> None:
    """Remove what killed writers have left anywhere below a folder."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if is_hidden(left := Path(place, name)):
                _remove_abandoned(left)


def reason(error: Exception) -> str:
    """Why something could not be written, in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())


def _sweep_beside(path: Path) -> None:
    """Remove what killed writers of `path` have left."""
    for left in path.parent.glob(glob.escape(_beginning(path)) + "*"):
        if is_hidden(left):
            _remove_abandoned(left)


def is_hidden(path: Path) -> bool:
    """Whether a name is of something that is being written, or was when its writer was killed."""
    return HIDDEN.fullmatch(path.name) is not None


def aside_of(path: Path) -> Path:
    """Where a folder is for a moment while another takes its place, if the two cannot be exchanged."""
    return path.with_name(f".{path.name}-old")


def _beginning(path: Path) -> str:
    return f".{path.name}-new-"


def _new_file(path: Path) -> Path:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_beginning(path))
    os.close(descriptor)
    return Path(name)


def _new_folder(path: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=path.parent, prefix=_beginning(path)))


def _hidden(path: Path, make: Callable[[Path], Path]) -> tuple[Path, int | None]:
    """A new file or folder beside `path`, and a descriptor that locks it; None where the file system knows no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep_beside(path)
    for _ in range(TRIES):
        temporary = make(path)
        try:
            lock = _lock(temporary)
        except OSError as error:
            if error.errno not in HELD:
                return temporary, None
            continue  # another process took it for abandoned, and removes it
        if temporary.exists():
            return temporary, lock
        os.close(lock)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


@contextmanager
def _closing(descriptor: int | None) -> Iterator[None]:
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove it unless its writer lives."""
    try:
        lock = _lock(path)
    except OSError:
        return
    with _closing(lock):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _lock(path: Path) -> int:
    """A descriptor that holds the lock of a file or folder until it is closed or the process ends. Raises OSError if another
    process has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False where that does not exist."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number))
