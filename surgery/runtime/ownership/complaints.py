"""What could not be written, or was not, in one line."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from surgery.errors import UserError


def refuse(foreign: Iterable[Path]) -> None:
    """Raise UserError, naming the first, if there are files of the user's."""
    if others := sorted(foreign):
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise UserError(
            f"'{others[0]}'{more} was not written by this toolkit, or was changed since: it is neither replaced nor removed; "
            "move it away, or choose another place"
        )


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
