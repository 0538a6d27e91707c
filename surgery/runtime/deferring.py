"""Signals that ask a process to end wait until a piece of work is whole."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Meanwhile the first of SIGNALS does nothing but to be remembered; a second one ends the process at once. Yields what says
    whether one has come. At the end it goes to whatever listened before. Signals that are ignored stay so."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield lambda: False
        return

    def remember(number: int, _: FrameType | None) -> None:
        came.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, remember) for number in heard}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
