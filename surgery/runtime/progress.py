"""Progress of long work: a bar with the time left on a terminal, plain lines elsewhere; of several processes, only the main one
shows any."""

import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.text import Text

from surgery.runtime.printable import printable
from surgery.runtime.processes import is_main

T = TypeVar("T")
console = Console(stderr=True)
EVERY = 15.0  # seconds between two plain lines
BAR = 16  # characters
_silent: list[None] = []  # an entry for every block of `silently` that is open


@contextmanager
def silently() -> Iterator[None]:
    """Meanwhile nothing is said or shown: for work that is done to measure it."""
    _silent.append(None)
    try:
        yield
    finally:
        _silent.pop()


def _shows() -> bool:
    return not _silent and is_main()


def say(line: str) -> None:
    """One line for the person who waits. On a terminal it is broken between words where it is too long."""
    if _shows():
        if console.is_terminal:
            line = textwrap.fill(line, console.width, break_long_words=False, break_on_hyphens=False)
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """As a person would say it: 8 s, 3 min, 2.5 h, 4 days."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"{round(seconds / 86400)} days"


class Track(Iterable[T]):
    """Iterate with progress. `note` shows a figure (a loss, say) beside it. `before` items of `total` were done earlier.

    Without a terminal a line is printed after the first item, if the rest is going to take longer than `interval` seconds, and
    then at most every `interval` seconds; none for work that is done before that.
    """

    def __init__(
        self, items: Iterable[T], description: str, total: int | None = None, interval: float = EVERY, before: int = 0
    ):
        self.items, self.description, self.interval, self.before = items, description, interval, before
        self.total = total if total is not None else len(items)  # type: ignore[arg-type]
        self.note = ""

    def __iter__(self) -> Iterator[T]:
        if not _shows():
            return iter(self.items)
        return self._bar() if console.is_terminal else self._lines()

    def _bar(self) -> Iterator[T]:
        with _row(self.description, self.total, lambda: self.note, self.before) as (display, row):
            for item in self.items:
                yield item
                display.update(row, advance=1)

    def _lines(self) -> Iterator[T]:
        start = last = time.monotonic()
        for done, item in enumerate(self.items, 1):
            yield item
            now = time.monotonic()
            left = (now - start) / done * (self.total - self.before - done)
            if now - last > self.interval or (done == 1 and left > self.interval):
                last = now
                line = f"{self.description}: {self.before + done}/{self.total}, about {duration(left)} left  {self.note}"
                print(line.rstrip(), file=sys.stderr, flush=True)


@contextmanager
def counting(total: int, description: str) -> Iterator[Callable[[], None]]:
    """Progress of work that is not a loop: yields what is to be called when one of its `total` parts is done. Fewer may be."""
    progress = iter(Track(range(total), description))
    next(progress, None)  # the bar is there from the beginning

    def advance() -> None:
        next(progress, None)

    yield advance
    for _ in progress:
        pass


@contextmanager
def busy(description: str, after: float | None = EVERY) -> Iterator[None]:
    """Work whose end cannot be foreseen: on a terminal a moving bar and the time that has passed; elsewhere a line, if it takes
    longer than `after` seconds (None: none)."""
    if not _shows():
        yield
    elif console.is_terminal:
        with _row(description, None):
            yield
    elif after is None:
        yield
    else:
        late = threading.Timer(after, lambda: print(f"{description} ...", file=sys.stderr, flush=True))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()


class _Line(ProgressColumn):
    """Description, bar, what is left at the pace so far (where that is not known, what has passed), and the note: one line,
    whatever the terminal's width."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0
        if task.total is None:
            return Text(f"{task.description}  {duration(elapsed)}", no_wrap=True, overflow="ellipsis")
        full = round(BAR * task.completed / task.total) if task.total else BAR
        done = f"{task.completed:.0f}/{task.total:.0f}"
        now = task.completed - task.fields["before"]  # what this process has done
        left = elapsed / now * (task.total - task.completed) if now else None
        state = f"{done}, about {duration(left)} left" if left is not None else f"{done}, {duration(elapsed)} so far"
        line = Text(f"{task.description} ", no_wrap=True, overflow="ellipsis")
        line.append("━" * full, "green").append("─" * (BAR - full), "dim")
        return line.append(f" {state}  {task.fields['note']()}")


_display: list[Progress] = []  # the one that is shown, as rich can show one at a time


@contextmanager
def _row(
    description: str, total: int | None, note: Callable[[], str] = str, before: int = 0
) -> Iterator[tuple[Progress, TaskID]]:
    """A row of the display, which is shown as long as it has any."""
    if not _display:
        _display.append(Progress(_Line(), console=console, transient=True))
        _display[0].start()
    display = _display[0]
    row = display.add_task(description, total=total, completed=before, note=note, before=before)
    try:
        yield display, row
    finally:
        display.remove_task(row)
        if not display.tasks and _display:
            _display.pop().stop()
