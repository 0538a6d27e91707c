"""What a person sees while something works: lines and one bar, on standard error; on a terminal a bar, elsewhere few lines."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from surgery.runtime.processes import is_main

T = TypeVar("T")
QUIET_SECONDS = 30.0  # between two lines about the same work, where there is no terminal
_drawing = threading.Lock()  # rich draws one bar at a time; a bar within a bar is not drawn


def say(text: str) -> None:
    """Print a line on standard error, once if there are several processes."""
    if is_main():
        print(printable(text), file=sys.stderr, flush=True)


def show(text: Any) -> None:
    """Print a result on standard output, once if there are several processes."""
    if is_main():
        print(printable(str(text)), flush=True)


def bar(iterable: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Pass on what an iterable gives, and show how far it is. total: how many there are; by default what len() says."""
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if not is_main() or not _drawing.acquire(blocking=False):
        yield from iterable
        return
    try:
        if sys.stderr.isatty():
            yield from _on_terminal(iterable, what, total)
            return
        begun = said = time.monotonic()
        for number, item in enumerate(iterable, start=1):
            yield item
            now = time.monotonic()
            if now - said > QUIET_SECONDS:
                said = now
                left = f" of {total}, about {duration((now - begun) / number * (total - number))} left" if total else ""
                say(f"{what}: {number}{left}")
    finally:
        _drawing.release()


def _on_terminal(iterable: Iterable[T], what: str, total: int | None) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(what), total=total)
        for item in iterable:
            yield item
            progress.advance(task)


def duration(seconds: float) -> str:
    """Seconds in words: "40 s", "3 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """A number of bytes in words: "82 KiB", "1.1 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"


def printable(text: str) -> str:
    """A text without what a terminal would obey: control characters are written as \\x1b and the like."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
