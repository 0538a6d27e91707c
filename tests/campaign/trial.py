"""One trial: a command of the toolkit in a process of its own, which is forked from one that has imported everything; and what
is found wrong with how it ended."""

import contextlib
import hashlib
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.campaign.forked import become

LIMIT = 30.0  # seconds of the processor
PATIENCE = 10 * LIMIT  # seconds by the clock: a busy machine gives a trial little of its processors, and what waits uses none
MEMORY = 1 << 30  # bytes that a trial may hold beyond what the process held when it began
ADDRESSES = 4 << 30  # bytes of addresses that it may take beyond: what asks for more at once is told so by the system
LONGEST = 2000  # characters of what is said
NOISE = re.compile(r"Traceback|Warning:|Exception ignored|Segmentation|core dumped|\.py:\d+")
# What a command may keep whose refusal is a finding, by what it says: what it had measured, for --resume.
MEASURING = r"out(/(recipe\.yaml|run\.json|(locate|cells|planning)(/.*)?))?"
KEPT = {
    "not finite": re.compile(MEASURING),
    "no head is worth its cache": re.compile(rf"{MEASURING}|out/(ranking\.(json|safetensors)|(atlas|mixing)\.png)"),
}


@dataclass
class Outcome:
    """How a trial ended. seconds: of the processor. wrong: what must not be, in words; empty if all is well."""

    status: int = 0
    seconds: float = 0.0
    memory: int = 0
    said: str = ""
    printed: str = ""
    wrong: list[str] = field(default_factory=list)

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def attempt(arguments: Sequence[str], folder: Path, statuses: Sequence[int] = (0, 2)) -> Outcome:
    """Run `surgery ARGUMENTS` in a folder and judge it. statuses: with which it may end."""
    logs = folder.with_name(f"{folder.name}.log")
    logs.mkdir(exist_ok=True)
    before, begun = listing(folder), time.monotonic()
    held = _resident()
    child = os.fork()
    if child == 0:
        _be(arguments, folder, logs)
    ended, hung = _wait(child, begun, held)
    code, usage = ended
    outcome = Outcome(
        status=os.waitstatus_to_exitcode(code), seconds=usage.ru_utime + usage.ru_stime,
        memory=max(0, usage.ru_maxrss * 1024 - max(held, _at_rest())),
        said=(logs / "err").read_text(errors="replace"), printed=(logs / "out").read_text(errors="replace")[-LONGEST:],
    )  # fmt: skip
    outcome.wrong = list(complaints(outcome, hung, statuses))
    if outcome.status not in (0, 1) and (after := listing(folder)) != before:
        changed = sorted({name for name, _ in before ^ after})
        if not kept_measurements(outcome.said, changed):
            outcome.wrong.append(f"wrote: {', '.join(changed[:3])}")
    return outcome


def kept_measurements(said: str, changed: Sequence[str]) -> bool:
    """Whether a command kept what it had measured before it met a number that is not finite, or no head that is worth a graft,
    and nothing else: that shows in no file, only in the work itself, and what was measured is for --resume."""
    last = said.strip().rpartition("\n")[2]
    return any(all(kept.fullmatch(name) for name in changed) for finding, kept in KEPT.items() if finding in last)


def listing(folder: Path) -> set[tuple[str, str]]:
    """Every file and folder of a tree with a digest; links are not followed."""
    entries = set()
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 2**26
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if plain else ""
            entries.add((str(path.relative_to(folder)), digest))
    return entries


def complaints(outcome: Outcome, hung: str, statuses: Sequence[int]) -> Iterator[str]:
    """What must not be, in words. hung: why the trial was stopped, if it was."""
    lines = outcome.said.strip().splitlines()
    if hung:
        yield hung
    elif outcome.status < 0:
        yield f"ended by {signal.Signals(-outcome.status).name}"
    elif outcome.status not in statuses:
        yield f"status {outcome.status}"
    if outcome.memory > MEMORY:
        yield f"memory: {outcome.memory / 2**20:.0f} MiB"
    if noise := NOISE.search(outcome.said):
        yield f"noise: {noise.group()}"
    if outcome.status == 2 and not hung:
        usage = lines and (lines[0].startswith("Usage:") or "Error" in outcome.said)  # what no verb was reached with
        if not usage and (not lines or not lines[-1].startswith("surgery: ")):
            yield "no line that says what is wrong"
        if lines and len(lines[-1]) > LONGEST:
            yield f"a line of {len(lines[-1])} characters"


def _be(arguments: Sequence[str], folder: Path, logs: Path) -> None:
    """Become the command. Does not return."""

    def prepare() -> None:
        os.setsid()  # so that what it starts ends with it
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (_addresses() + ADDRESSES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115

    become(arguments, folder, prepare)


def _wait(child: int, begun: float, held: int) -> tuple[tuple[int, Any], str]:
    """Wait for a child, but not for ever, and not while it eats the memory: (its status and usage, what it was stopped for)."""
    pause, why = 0.001, ""
    while True:
        ended, code, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return (code, usage), why
        if not why and (why := _excess(child, begun, held)):
            with contextlib.suppress(ProcessLookupError):  # it has only now begun, and has no group of its own yet
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(0.02, pause * 1.2)


def _excess(child: int, begun: float, held: int) -> str:
    """What a trial is stopped for, or ""."""
    if _processor(child) > LIMIT or time.monotonic() - begun > PATIENCE:
        return f"hangs: over {LIMIT:.0f} s"
    return "memory: stopped" if _resident(child) - held > MEMORY else ""


def _processor(of: int) -> float:
    """Seconds of the processor that a process has used."""
    try:
        fields = Path(f"/proc/{of}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(of: int | str, name: str) -> int:
    try:
        lines = Path(f"/proc/{of}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


@cache
def _at_rest() -> int:
    """Bytes that a fork of this process held at most, as the system counts shared pages, if it does nothing."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    return os.wait4(child, 0)[2].ru_maxrss * 1024


def _resident(of: int | str = "self") -> int:
    return _status(of, "VmRSS")


def _addresses() -> int:
    return _status("self", "VmSize")
