"""The peak memory of a command, its children included, and its time.

What is counted is the memory that is in RAM: pages of its own and pages of files that it maps (weights are mapped). Pages
that several of its processes share count once. Linux gives this as the proportional set size (PSS) of each process; the sum is
sampled. Reading it takes a walk through the page tables, tens of milliseconds for a 7B model. So it is read only while the sum
of the resident sizes (RSS), which costs nothing to read and is never less, is above the highest PSS so far. A single process
may peak between two samples: the kernel keeps that peak (VmHWM), and the larger of both is the result.
"""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

INTERVAL = 0.1  # seconds between samples
STATUS, ROLLUP = "/proc/{pid}/status", "/proc/{pid}/smaps_rollup"
SIZE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


class Outcome(NamedTuple):
    """status: exit status, negative for a signal. seconds, cpu_seconds: of wall time, and of all its processors together.
    output: the end of what it printed. In bytes: peak, pages of its own and of mapped files; anonymous, the most of its own,
    which cannot be dropped; files, of mapped files at the peak, which the system can drop and read again."""

    status: int
    seconds: float
    cpu_seconds: float
    peak: int
    anonymous: int
    files: int
    output: str


def measure(command: Sequence[str], log: Path, settings: dict[str, str] | None = None, folder: Path | None = None) -> Outcome:
    """Run a command to its end, in a folder. log: takes what it prints. settings: further environment variables."""
    start = time.monotonic()
    peak = anonymous = files = 0
    with log.open("wb") as printed:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, cwd=folder,
            env=os.environ | (settings or {}),
        )  # fmt: skip
        process = psutil.Process(child.pid)
        try:
            while True:
                ended, status, usage = os.wait4(child.pid, os.WNOHANG)
                if ended:
                    break
                family = _family(process)
                if sum(_read(STATUS, each.pid).get("VmRSS", 0) for each in family) > peak:
                    pages = [_read(ROLLUP, each.pid) for each in family]
                    total = sum(page.get("Pss", 0) for page in pages)
                    if total > peak:
                        peak, files = total, sum(page.get("Pss_File", 0) for page in pages)
                states = [_read(STATUS, each.pid) for each in family]
                peak = max([peak, *(state.get("VmHWM", 0) for state in states)])
                anonymous = max(anonymous, sum(state.get("RssAnon", 0) for state in states))
                time.sleep(INTERVAL)
        except BaseException:
            child.kill()
            child.wait()
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds, output = time.monotonic() - start, log.read_text(errors="replace")[-2000:]
    return Outcome(child.returncode, seconds, usage.ru_utime + usage.ru_stime, peak, anonymous, files, output)


def _family(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def _read(place: str, pid: int) -> dict[str, int]:
    """The sizes that the kernel names there, in bytes; none of a process that has just ended."""
    with contextlib.suppress(OSError):
        return {name: 1024 * int(size) for name, size in SIZE.findall(Path(place.format(pid=pid)).read_text())}
    return {}
