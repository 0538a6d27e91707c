"""What is done to good inputs to make bad ones: to values of a tree, to the text of JSON or YAML, to bytes, and to files.

All of it is drawn from the generator that is given, so that a number and a seed give the same input again.
"""

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

HUGE = 10**30
NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 7, -HUGE, HUGE, 10**9, 10**10, 10**18, 2**31, 2**32, 2**63, 2**64, 10**400, 0.5, -0.5, 1e308, -1e308,
    1e-320, float("inf"), float("-inf"), float("nan"), True, False,
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "\x00", "a\x00b", "\ud800", "x" * 300, "a/" * 3000, "..", ".", "/", "/dev/zero", "/dev/null", "/proc/self/mem",
    "~", "nan", "Infinity", "null", "true", "L0", "L0.H0", "L999.H0", "L0.H999999999999999999999", "L-1.H0", "[", "{{}}",
    "%s%n", "\n", "world", "auto", "meta", "cuda", "kv", "quick", "float64", "int8", "\u202e", "\U0001f40d" * 20, "1" * 5000,
    "__class__",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, [], {}, [[]], [None], {"": None}, [1, 2], ["a"], {"a": 1}, [[0, 1], [1, 0]], {"name": "kv"})


def arbitrary(campaign: int, count: int = 400) -> list[Any]:
    """Values of JSON as hypothesis draws them, the same for a seed."""
    # No numbers between: sizes that no machine has are refused at once, and hours of honest work are no matter of a campaign.
    whole = st.integers(-9, 9) | st.integers(2**40, 2**80) | st.integers(-(2**80), -(2**40))
    scalars = st.none() | st.booleans() | whole | st.floats() | st.text(st.characters(), max_size=12)
    keys = st.text(max_size=6)
    trees = st.recursive(scalars, lambda part: st.lists(part, max_size=3) | st.dictionaries(keys, part, max_size=3))
    values: list[Any] = []

    @seed(campaign)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    @given(trees)
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    return values


def _said(value: Any) -> str:
    try:
        return str(value)
    except RecursionError:
        return "deep"


class Mutator:
    """pool: arbitrary values, of which some are drawn."""

    def __init__(self, rng: random.Random, pool: list[Any]):
        self.rng, self.pool = rng, pool

    def value(self) -> Any:
        """A value that nobody expects."""
        kinds: list[Callable[[], Any]] = [
            lambda: self.rng.choice(NUMBERS), lambda: self.rng.choice(NUMBERS), lambda: self.rng.choice(TEXTS),
            lambda: copy.deepcopy(self.rng.choice(OTHERS)), lambda: copy.deepcopy(self.rng.choice(self.pool or OTHERS)),
            lambda: _nested(self.rng.choice((5, 150, 5000)), self.rng.random() < 0.5),
        ]  # fmt: skip
        return self.rng.choices(kinds, (3, 3, 4, 3, 3, 1))[0]()

    def tree(self, tree: Any, times: int | None = None) -> Any:
        """A copy with one or a few of its parts replaced, taken out, moved, renamed or added."""
        tree = copy.deepcopy(tree)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3)) if times is None else times):
            places = list(_places(tree))
            if not places:
                return self.value()
            holder, key = self.rng.choice(places)
            what = self.rng.choice(("value", "value", "value", "near", "drop", "rename", "add", "swap"))
            if what == "value":
                holder[key] = self.value()
            elif what == "near":
                holder[key] = self.near(holder[key])
            elif what == "drop":
                del holder[key]
            elif what == "rename" and isinstance(holder, dict):
                holder[self.rng.choice((f"{key}_", str(key).upper(), "x" * 300, "", "\ud800"))] = holder.pop(key)
            elif what == "add" and isinstance(holder, dict):
                holder[self.rng.choice(("auto_map", "extra", "schema_version", "__proto__", " "))] = self.value()
            elif what == "swap":
                other, name = self.rng.choice(places)
                if not _holds(holder[key], other) and not _holds(other[name], holder):
                    holder[key], other[name] = other[name], holder[key]
        return tree

    def near(self, value: Any) -> Any:
        """Something almost like a value."""
        if isinstance(value, bool) or value is None:
            return self.rng.choice((not value, int(bool(value)), str(value)))
        if isinstance(value, int | float):
            return self.rng.choice((-value, value + 1, value - 1, value * 10**9, value * 1.5, str(value), [value], value / 3))
        if isinstance(value, str):
            at = self.rng.randrange(len(value) + 1)
            return self.rng.choice((value[:at], value + value, value[:at] + "\x00" + value[at:], value.swapcase(), [value]))
        if isinstance(value, list):
            return self.rng.choice((value * 2, value[:-1], [*value, None], dict(enumerate(map(_said, value))), [value]))
        return self.rng.choice(([value], list(value), {**value, "extra": 1}))

    def text(self, text: str) -> str:
        """The text of a file, spoilt as text."""
        lines, at = text.split("\n"), self.rng.randrange(len(text) + 1)
        line, (before, after) = self.rng.randrange(len(lines)), (text[:at], text[at:])
        parts = ("\x00", "\x1b[2J", ",", ":", "}", "]", '"', "!!int x", "!!python/object:os.system x", "&a [*a, *a]",
                 "2024-13-45", "NaN", "-", "\r", "\u2028", "<<: 1", "? ", "|", "---\n", "\t")  # fmt: skip
        ways: list[Callable[[], str]] = [
            lambda: before,
            lambda: "\n".join([*lines[: line + 1], *lines[line:]]),  # a key that is there twice
            lambda: "\n".join(self.rng.sample(lines, len(lines))),
            lambda: before + self.rng.choice("[{") * self.rng.choice((10, 1000, 100_000)) + after,
            lambda: before + "9" * self.rng.choice((3, 400, 5000)) + after,
            lambda: "\ufeff" + text,
            lambda: before + after[self.rng.choice((1, 2, 20)) :],
            lambda: text + text,
            lambda: before + self.rng.choice(parts) + after,
        ]
        return self.rng.choice(ways)()

    def bytes(self, content: bytes) -> bytes:
        """The bytes of a file, spoilt as bytes."""
        changed, what = bytearray(content), self.rng.choice(("flip", "flip", "flips", "cut", "zero", "insert", "end", "length"))
        # Most of what can go wrong stands at the beginning.
        at = self.rng.randrange(max(1, min(len(content), self.rng.choice((8, 64, 4096, len(content))))))
        if what in ("flip", "flips"):
            for _ in range(1 if what == "flip" else 40):
                if changed:
                    changed[at % len(changed)] ^= 1 << self.rng.randrange(8)
                    at = self.rng.randrange(len(changed))
        elif what == "cut":
            del changed[at:]
        elif what == "zero":
            changed[at : at + 64] = bytes(len(changed[at : at + 64]))
        elif what == "insert":
            changed[at:at] = self.rng.randbytes(self.rng.choice((1, 8, 300)))
        elif what == "end":
            changed += self.rng.randbytes(self.rng.choice((1, 8, 300)))
        elif len(changed) >= 8:  # of a safetensors header
            changed[:8] = self.rng.choice((0, 1, 8, len(content), 10**9, 2**63, 2**64 - 1)).to_bytes(8, "little")
        return bytes(changed)

    def file(self, path: Path) -> None:
        """Put something else in the place of a file."""
        content = path.read_bytes() if path.is_file() else b""
        path.unlink(missing_ok=True)
        kinds = ("nothing", "folder", "fifo", "loop", "zero", "null", "empty", "broken", "latin", "utf16", "sparse")
        what = self.rng.choice(kinds)
        if what == "folder":
            path.mkdir()
        elif what == "fifo":
            os.mkfifo(path)
        elif what == "loop":
            path.symlink_to(path.name)
        elif what in ("zero", "null"):
            path.symlink_to(f"/dev/{what}")
        elif what == "broken":
            path.symlink_to("nowhere")
        elif what == "sparse":
            with path.open("wb") as file:
                file.truncate(2**40)
        elif what != "nothing":
            path.write_bytes({"empty": b"", "latin": b"caf\xe9\n" + content, "utf16": b"\xff\xfe" + content}[what])

    def json_file(self, path: Path) -> None:
        """Spoil a JSON file in one of these ways."""
        what = self.rng.choices(("tree", "text", "bytes", "file"), (12, 4, 3, 1))[0]
        if what == "file":
            self.file(path)
        elif what == "tree" and (tree := _tree(path)) is not None:
            replace(path, dumped(self.tree(tree)))
        elif what in ("tree", "text"):
            replace(path, self.text(path.read_text()).encode("utf-8", "surrogatepass"))
        else:
            replace(path, self.bytes(path.read_bytes()))


def dumped(tree: Any) -> bytes:
    """A tree as JSON; what no recursion of Python writes is written by hand."""
    try:
        return json.dumps(tree, indent=1).encode()
    except (RecursionError, ValueError):
        return b"[" * 100_000


def replace(path: Path, content: bytes) -> None:
    """Write a file of its own where a link stood."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _nested(depth: int, mapping: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if mapping else [value]
    return value


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(what holds it, its key) of every part of a tree."""
    pending = [tree]
    while pending:
        holder = pending.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            pending.append(holder[key])


def _holds(tree: Any, part: Any) -> bool:
    return tree is part or any(holder[key] is part for holder, key in _places(tree))


def _tree(path: Path) -> Any:
    """What a JSON file holds; None for rows of JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None
