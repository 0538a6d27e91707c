"""Files that are handed in, read in one place: whatever is wrong with one is one clear line, before any of it is in memory.

A plain file only: a pipe would be waited for, and /dev/zero has no end. JSON and YAML give trees of what JSON knows, in which
no key occurs twice, and nothing that the rest of the program would stumble over: no text that cannot be written or be a path,
no nesting that no recursion reaches the end of, no number of thousands of digits.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from surgery.errors import UserError
from surgery.runtime.whole_memory import in_all

DEEPEST = 100  # levels of a tree; a record has less than ten
MOST_PARTS = 5_000_000  # of a tree
LARGEST = 2**1024  # beyond it, numbers are no floats any more
LONGEST_NAME = 240  # bytes; 255 is what file systems take, and some is added for temporary files
LONGEST_PATH = 3500
SHARE = 8  # of the memory of the machine, a file that is read whole may take one part in so many
MOST_FILES = 100_000  # of a folder of texts or of a data set: to look for one in a whole disk takes hours
PLAIN_TEXT = (".txt", ".md")  # what text files of a folder end with
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # in JSON written as \\u0000 and \\ud800
HALF = re.compile("[\ud800-\udfff]")


def check_name(place: Any) -> Any:
    """What names a file, a folder or a model, or several, as it is. Raises UserError for what no file system can hold."""
    for part in place if isinstance(place, list | tuple) else ():
        check_name(part)
    if isinstance(place, str | Path):
        text = str(place)
        if isinstance(place, str) and not text.strip():
            raise UserError("a name is empty; leave the setting out, or write '.' for the current folder")
        if UNUSABLE.search(text):
            raise UserError(f"no file can have the name '{shown(text)}'")
        longest = max(len(part.encode()) for part in text.split("/"))
        if "://" not in text and (longest > LONGEST_NAME or len(text.encode()) > LONGEST_PATH):
            raise UserError(f"a name of {len(text)} characters is too long for a file: {shown(text, 40)}")
    return place


def check_plain(path: str | Path, what: str = "") -> int:
    """The size of a plain file in bytes. Raises UserError with one line for anything else. what: what it is to hold ("the
    recipe")."""
    path = Path(path)
    place = f"cannot read {f'{what} {shown(path)}'.strip()}"
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}") from error
    except ValueError as error:  # NUL, half of a surrogate pair
        raise UserError(f"{place}: no file can have that name") from error
    if stat.S_ISDIR(state.st_mode):
        raise UserError(f"{place}: it is a folder, and what is needed is a file")
    if not stat.S_ISREG(state.st_mode):
        raise UserError(f"{place}: it is no plain file (a device, or a pipe)")
    return state.st_size


def read_content(path: str | Path, what: str = "") -> bytes:
    """The bytes of a plain file that takes at most an eighth of the machine's memory. Raises UserError with one line."""
    size, most = check_plain(path, what), in_all() // SHARE
    place = f"cannot read {f'{what} {shown(Path(path))}'.strip()}"
    if size > most:
        raise UserError(f"{place}: it has {size:,} bytes, and at most {most / 2**20:,.0f} MiB are read")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}") from error


def files_below(folder: str | Path, what: str) -> list[Path]:
    """The files of a folder and of those in it, by their names. Raises UserError, in one line that begins with `what`, for more
    than anybody means."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    if len(found := list(islice(files, MOST_FILES + 1))) > MOST_FILES:
        raise UserError(f"{what}: {folder} holds more than {MOST_FILES:,} files; name the texts' own folder")
    return sorted(found)


def parse_json(text: str, what: str, *, any_text: bool = False) -> Any:
    """The value of a JSON text. Raises UserError, in one line that begins with `what`, if it has none that can be used.
    any_text: whether its texts may hold NUL, as documents may."""
    try:
        tree = json.loads(text, object_pairs_hook=_distinct)
    except RecursionError as error:
        raise UserError(f"{what} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # also a number of thousands of digits
        raise UserError(f"{what} is not JSON: {error}") from error
    check_tree(tree, what, any_text=any_text)
    return tree


def parse_json_lines(text: str, source: str, *, any_text: bool = False) -> Iterator[tuple[int, Any]]:
    """(number, value) of every line that is not blank, from 1 on. Raises UserError as parse_json does, naming source and
    line."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, parse_json(line, f"{source}, line {number},", any_text=any_text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a key that is there twice, of which Python would take the last one in silence."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key '{next(name for name in tree if names.count(name) > 1)}' is there twice")
    return tree


def check_tree(tree: Any, what: str, most: int = MOST_PARTS, *, any_text: bool = False) -> None:
    """Raise UserError, in one line that begins with `what`, for a tree that holds what JSON does not know, or what nobody can
    use. See the module; any_text as for parse_json."""
    for parts, (depth, value) in enumerate(_parts(tree)):
        if depth > DEEPEST:
            raise UserError(f"{what} is nested more than {DEEPEST} levels deep")
        if parts > most:
            raise UserError(f"{what} holds more than {most:,} values")
        if isinstance(value, str):
            if (HALF if any_text else UNUSABLE).search(value):
                held = "half a surrogate pair" if any_text else "a NUL or half a surrogate pair"
                raise UserError(f"{what} holds a text with {held}: {shown(value)}")
        elif isinstance(value, int | float):
            if isinstance(value, int) and abs(value) >= LARGEST:
                raise UserError(f"{what} holds a number of more than 300 digits")
        elif isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                key = next(key for key in value if not isinstance(key, str))
                raise UserError(f"{what} has the key {shown(key)}, which is no text; put it between quotes")
        elif value is not None and not isinstance(value, list):
            raise UserError(f"{what} holds {shown(value)}, a {type(value).__name__}; put it between quotes if text is meant")


def _parts(tree: Any) -> Iterator[tuple[int, Any]]:
    """(level, value) of every part of a tree, keys included; where it has no end, neither has this."""
    pending = [(0, tree)]
    while pending:
        depth, value = pending.pop()
        yield depth, value
        if isinstance(value, dict):
            pending += ((depth, key) for key in value)
            pending += ((depth + 1, part) for part in value.values())
        elif isinstance(value, list):
            pending += ((depth + 1, part) for part in value)


def shown(value: Any, most: int | None = None) -> str:
    """A value in a message: on one line, of which a terminal can show every character, and without its middle if it has more
    than `most` characters, by default 80, of a path 240."""
    most = most or (240 if isinstance(value, Path) else 80)
    try:
        text = str(value) if isinstance(value, str | Path) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; a nesting
        text = f"a very long {type(value).__name__}"
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return text if len(text) <= most else f"{text[: most // 2 - 3]}...{text[-(most // 2) :]}"
