"""The one exception that users cause, and the hint in its text."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """Input that cannot be used. Its text is one line that names the input and says what to do; commands exit with 2."""


def did_you_mean(name: str, known: Iterable[str], folder: Path = Path()) -> str:
    """ " (did you mean ...?)", of the known name that is closest, as it stands in a folder; nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {folder / close[0]}?)" if close else ""
