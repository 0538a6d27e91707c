"""The peak memory of a command, its children included, and its time.

What is counted is the memory that stands in RAM: pages of its own and pages of files that it maps (weights are mapped), pages
that several of its processes share once. Linux gives this as the proportional set size (PSS) of each process, and their sum is
sampled. Reading it takes a walk through the page tables, tens of milliseconds for a 7B model, so it is read only while the sum of
the resident sizes (RSS), which costs nothing to read and is never less, is above the highest PSS so far. A single process may
peak between two samples: the kernel keeps that peak (ru_maxrss), and the larger of both is the result. A process begins with the
peak of the one that started it, so a peak that is not above this one's own says nothing and is left out.
"""

import contextlib
import os
import re
import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

INTERVAL = 0.1  # seconds between samples
ROLLUP = re.compile(r"^(Pss|Pss_Anon|Pss_File|Pss_Shmem): +(\d+) kB$", re.MULTILINE)


class Peak(NamedTuple):
    """Bytes. highest: pages of its own and of mapped files. anonymous: the most of its own, which cannot be dropped. files: mapped
    files at the moment of the highest sample; the system can drop these and read them again. samples: how often PSS was read."""

    highest: int
    anonymous: int
    files: int
    samples: int


class Outcome(NamedTuple):
    """status: exit status, negative for a signal. seconds: of wall time. output: the end of what it printed."""

    status: int
    seconds: float
    peak: Peak
    output: str


def measure(command: Sequence[str], log: Path, settings: dict[str, str] | None = None, folder: Path | None = None) -> Outcome:
    """Run a command to its end, in a folder. log: takes what it prints. settings: further environment variables."""
    start, inherited = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    highest = anonymous = files = samples = 0
    with log.open("wb") as printed:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | (settings or {}),
        )
        process = psutil.Process(child.pid)
        try:
            while True:
                ended, status, usage = os.wait4(child.pid, os.WNOHANG)
                if ended:
                    break
                family = _family(process)
                if (resident := sum(map(_resident, family))) > max(highest, 1) or samples == 0:
                    pages = [_pages(each.pid) for each in family]
                    total, own = sum(page["Pss"] for page in pages), sum(page["Pss_Anon"] for page in pages)
                    samples += 1
                    if total > highest:
                        highest, files = total, sum(page["Pss_File"] for page in pages)
                    anonymous = max(anonymous, own)
                elif resident > anonymous:
                    anonymous = max(anonymous, sum(map(_own, family)))
                time.sleep(INTERVAL)
        except BaseException:
            child.kill()
            child.wait()
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    # In KiB, the largest of the process and of the children that it has waited for.
    single = 1024 * usage.ru_maxrss if usage.ru_maxrss > inherited else 0
    said = log.read_text(errors="replace")[-2000:]
    return Outcome(child.returncode, seconds, Peak(max(highest, single), anonymous, files, samples), said)


def _family(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0


def _own(process: psutil.Process) -> int:
    """Pages of its own: resident without those of files."""
    with contextlib.suppress(psutil.Error):
        memory = process.memory_info()
        return memory.rss - memory.shared
    return 0


def _pages(pid: int) -> dict[str, int]:
    """Of a process that has just ended, zeros."""
    read = dict.fromkeys(("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem"), 0)
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        read |= {name: 1024 * int(size) for name, size in ROLLUP.findall(text)}
    return read
