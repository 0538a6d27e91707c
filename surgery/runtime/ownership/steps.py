"""What the system does in one step, or not at all: a file gets its name when it is complete, two files are exchanged."""

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from surgery.runtime.ownership.complaints import refuse

AT_FDCWD, EXCHANGE_LINUX, EXCHANGE_MACOS = -100, 2, 2  # of linux/fcntl.h, linux/fs.h and sys/stdio.h
HIDDEN = re.compile(r"-new-[0-9a-f]{8}$")


def real(path: Path) -> Path:
    """Without links, whether it is there or not."""
    return Path(os.path.realpath(path))


def hidden_name(path: Path) -> Path:
    """Where something is until it is complete."""
    return path.with_name(f".{path.name[:200]}-new-{secrets.token_hex(4)}")


def is_hidden(other: Path, path: Path) -> bool:
    """Whether `other` has a name that hidden_name(path) may give."""
    return other.name.startswith(f".{path.name[:200]}-new-") and HIDDEN.search(other.name) is not None


def digest_of(path: Path) -> str:
    """sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def create(path: Path, content: bytes, hidden: Path | None = None, mode: int | None = None) -> None:
    """Make a file that is complete when it gets its name. hidden: what it is called until then, where the system gives every
    file a name from the first byte on. mode: unless the user's umask decides. Raises FileExistsError if there is one."""
    hidden = hidden or hidden_name(path)
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
            install(hidden, path, None)
    finally:
        os.close(descriptor)
        if not unnamed and hidden != path:
            hidden.unlink(missing_ok=True)


def install(source: Path, target: Path, expected: bytes | str | None) -> None:
    """Give the complete file `source` the name `target`. expected: what is there, its bytes or their sha256; None: nothing.
    Raises UserError (FileExistsError where nothing was expected), both as they were, if there is something else by now."""

    def fits(path: Path) -> bool:
        return (path.read_bytes() if isinstance(expected, bytes) else digest_of(path)) == expected

    if expected is None:
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError as error:  # a file system without links
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            os.rename(source, target)
    elif exchange(source, target):
        if not fits(source):
            exchange(source, target)
            refuse([target])
    else:
        if not fits(target):
            refuse([target])
        os.replace(source, target)


def exchange(first: Path, second: Path) -> bool:
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


def append_whole(descriptor: int, lines: bytes) -> None:
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


def lock(path: Path, *, wait: bool = True) -> int | None:
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
