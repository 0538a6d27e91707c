"""Progress of long work: a bar on a terminal, plain lines elsewhere; of several processes, only the main one shows any."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from surgery.runtime.processes import is_main

T = TypeVar("T")
console = Console(stderr=True)


def say(line: str) -> None:
    """One line for the person who waits."""
    if is_main():
        console.print(line, highlight=False, markup=False, soft_wrap=True)


class Track(Iterable[T]):
    """Iterate with progress. `note` shows a figure (a loss, say) beside it.

    A plain line is printed at most every `every` seconds, and none for work that is done before that.
    """

    def __init__(self, items: Iterable[T], description: str, total: int | None = None, every: float = 15.0):
        self.items, self.description, self.every = items, description, every
        self.total = total if total is not None else len(items)  # type: ignore[arg-type]
        self.note = ""

    def __iter__(self) -> Iterator[T]:
        if not is_main():
            return iter(self.items)
        return self._bar() if console.is_terminal else self._lines()

    def _bar(self) -> Iterator[T]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(self.description, total=self.total, note="")
            for item in self.items:
                yield item
                bar.update(task, advance=1, note=self.note)

    def _lines(self) -> Iterator[T]:
        last = time.monotonic()
        for done, item in enumerate(self.items, 1):
            yield item
            if time.monotonic() - last > self.every:
                last = time.monotonic()
                print(f"{self.description}: {done}/{self.total} {self.note}".rstrip(), file=sys.stderr, flush=True)
