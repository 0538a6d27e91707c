"""Ctrl-C and SIGTERM: a job ends in an orderly way, and says by which command it goes on."""

import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from surgery.runtime.deferring import SIGNALS

RESUMABLE = ("run", "locate", "tune", "bench")  # verbs with --resume
AGAIN = 0.05  # seconds after which a signal that was dropped is sent again
ANEW = ("prune",)  # verbs that keep a run and begin it anew

_begun = threading.Event()  # set when a verb has made its output folder ready, since the process listens


class Interrupted(BaseException):
    """A signal that asks the process to end. No Exception, so that no handler of ordinary errors takes it; no
    KeyboardInterrupt, which the command line's library would turn into a silent exit."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextmanager
def listening() -> Iterator[None]:
    """Meanwhile the first of SIGNALS raises Interrupted in the main thread; a second one ends the process at once."""
    _begun.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(number)

    def heard(unraisable: "sys.UnraisableHookArgs") -> None:
        """Python drops what is raised within a destructor or a callback of a weak reference: there, the signal comes again."""
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)
            return
        for each in SIGNALS:
            signal.signal(each, stop)
        threading.Timer(AGAIN, os.kill, (os.getpid(), unraisable.exc_value.number)).start()

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    hook, sys.unraisablehook = sys.unraisablehook, heard
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def note_beginning() -> None:
    """From here on, what is there to go on with is this run's."""
    _begun.set()


def continuation(argv: list[str], *, begun: bool | None = None, launched: bool = False) -> str:
    """The command that goes on where `argv` was interrupted. begun: whether its output folder was made ready; launched: whether
    accelerate started several processes."""
    program, *arguments = argv
    if launched:
        command = "accelerate launch ... -m surgery"  # with the options as before, which this process does not know
    elif Path(program).name == "__main__.py":
        command = "python -m surgery"
    else:
        on_path = os.path.realpath(shutil.which("surgery") or "surgery") == os.path.realpath(program)
        command = "surgery" if on_path else shlex.quote(program)
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    if verb in (*RESUMABLE, *ANEW) and (_begun.is_set() if begun is None else begun):
        arguments = [argument for argument in arguments if argument not in ("--overwrite", "--resume")]
        arguments.append("--resume" if verb in RESUMABLE else "--overwrite")
    return " ".join([command, *map(shlex.quote, arguments)])
