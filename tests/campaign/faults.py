"""What goes wrong in a trial: the library of faults.c, and one call of the command line in a forked process that it befalls.

The library has to be there from the start of a process, so a campaign starts itself again with it (`preloaded`). Then torch,
transformers and this package are imported once, and every trial is a fork of that: seconds less each.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.forked import become

SOURCE = Path(__file__).with_name("faults.c")
# Kind -> its number in faults.c. Of a "moment", the parent kills by its clock.
NUMBERS = {"none": 0, "count": 1, "kill": 2, "tear": 3, "term": 4, "int": 4, "full": 5, "read-only": 6, "moment": 0}
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT}
PATIENCE = 300  # seconds that a call may take


@dataclass(frozen=True)
class Fault:
    """kind: of NUMBERS. at: the number of the call that it befalls, from 1; of a "moment", seconds (of a trial
    that is drawn, the share of what an uninterrupted call takes)."""

    kind: str
    at: float = 0


@dataclass(frozen=True)
class Ended:
    """How a call of the command line ended. status: negative if a signal ended the process. calls: those that changed files."""

    status: int
    said: str
    seconds: float

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.said


def preloaded(work: Path) -> None:
    """Go on in a process with the library; returns in that one. work: where it is made."""
    library = work / "faults.so"
    if os.environ.get("LD_PRELOAD") == str(library):
        return
    work.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    quiet = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    quiet["MKL_CBWR"] = "COMPATIBLE"  # a product's last bit depends on nothing, not on where a matrix lies in memory either
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | quiet)


def surgery(arguments: list[str], folder: Path, fault: Fault = Fault("none"), log: Path | None = None) -> Ended:
    """`surgery ARGUMENTS` in a forked process whose working directory is `folder`; calls that change files below it count.
    log: for the fault "count", where they are listed."""
    said = folder.with_suffix(".said")
    said.write_text("")  # it may be killed before it opens the file
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _call(arguments, folder, fault, said, log)
    status = _wait(child, start + fault.at if fault.kind == "moment" else None, start + PATIENCE)
    ended = Ended(status, said.read_text(errors="replace"), time.monotonic() - start)
    said.unlink()
    return ended


def _wait(child: int, moment: float | None, end: float) -> int:
    """The exit status. The process is killed at a moment, and where it does not end."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if now > min(end, moment or end):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return status if now <= end else -signal.SIGALRM  # it hung
        time.sleep(0.002)


def _call(arguments: list[str], folder: Path, fault: Fault, said: Path, log: Path | None) -> None:
    """The forked process. It never returns."""

    def prepare() -> None:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        ctypes.CDLL(None).faults_arm(
            os.fsencode(os.getcwd()), NUMBERS[fault.kind], ctypes.c_long(int(fault.at)), SIGNALS.get(fault.kind, 0),
            None if log is None else os.fsencode(log),
        )  # fmt: skip

    become(arguments, folder, prepare)
