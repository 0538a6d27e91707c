"""Files: read with one-line errors, written so that a reader sees the old content or the new one."""

import os
import tempfile
from pathlib import Path

from surgery.errors import UserError


def read_text(path: str | Path) -> str:
    """A UTF-8 file. Raises UserError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file beside the old one, then put it in its place. Raises UserError where that cannot be done."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
