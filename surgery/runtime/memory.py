"""Memory and disk: the most that work holds at once, and what this machine has for it. All figures are bytes.

What is counted is resident memory: pages of a memory-mapped file count from when they are read. Linux itself keeps the peak of
a process, and takes it back where it is told to; elsewhere, and for child processes, a thread looks every few milliseconds.
"""

import ctypes
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from surgery.runtime import processes
from surgery.runtime.processes import on_this_machine
from surgery.runtime.whole_memory import in_all, limits

OWN = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
EVERY = 0.01  # seconds between two looks at this process, where the system keeps no peak
EVERY_CHILD = 0.1  # at its children: Linux keeps the peak of each, so none is missed that lives as long
BIG = 4 * 2**30  # bytes of weights: beside the work of so large a model, getting memory anew costs next to nothing
APART, M_MMAP_THRESHOLD = 2**20, -3  # bytes of an allocation; glibc's name for the setting
CHILDREN_LOOKED_AT = 64  # more are not this program's doing


def resident() -> int:
    """What this process holds now."""
    return psutil.Process().memory_info().rss


class Peak:
    """The most that was held at once while `measured` ran. After it, or so far.

    process: this process. children: its child processes, and theirs, together. total: all of them at the same time; of a child,
    its peak up to then counts. device: what torch held on this process's GPUs, the peaks of
    all together; 0 where there is none.
    """

    def __init__(self) -> None:
        self.process = self.children = self.device = self._together = 0

    @property
    def total(self) -> int:
        return max(self.process, self._together)

    def _take(self, process: int, device: int) -> None:
        self.process, self.device = max(self.process, process), max(self.device, device)

    def _take_children(self, children: int, process: int) -> None:
        """children: what they hold, while this process holds so much."""
        if children:
            self.children, self._together = max(self.children, children), max(self._together, children + process)


_open: list[Peak] = []  # those that run now: stages within a run
_lock = threading.RLock()


@contextmanager
def measured() -> Iterator[Peak]:
    """Measures the peak of what is done within. May be nested: the outer one's peak includes the inner one's."""
    peak, stop = Peak(), threading.Event()
    with _lock:
        _fold()
        _open.append(peak)
    thread = threading.Thread(target=_watch, args=(peak, stop), daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        with _lock:
            _fold()
            _open.remove(peak)
            for outer in _open:  # whose own thread may not have looked when this one did
                outer._take(peak.process, peak.device)


def _fold() -> None:
    """Gives what was the most since the last call to all that run, and starts anew."""
    with _lock:
        process, device = max(_kept(OWN) or 0 if _resettable() else 0, resident()), _device_peak()
        for peak in _open:
            peak._take(process, device)
        _reset()


def _reset() -> None:
    if _resettable():
        RESET.write_text("5")
    if (cuda := _cuda()) is not None:
        for device in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(device)


def _resettable() -> bool:
    """Whether the system keeps a peak and takes it back. Some sandboxes only keep that of the process's whole life."""
    return os.access(RESET, os.W_OK) and _kept(OWN) is not None


def _kept(status: Path) -> int | None:
    """The peak that the system has kept of a process; None where it keeps none."""
    try:
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


def _watch(peak: Peak, stop: threading.Event) -> None:
    own = psutil.Process()
    if _resettable():
        while not stop.wait(EVERY_CHILD):
            peak._take_children(_children(own), own.memory_info().rss)
        return
    last = 0.0
    while not stop.wait(EVERY):
        peak._take(own.memory_info().rss, 0)
        last += EVERY
        if last >= EVERY_CHILD:
            peak._take_children(_children(own), own.memory_info().rss)
            last = 0.0


def _children(own: psutil.Process) -> int:
    """What child processes hold. One that runs this very command is this process's copy, which shares its pages: until it
    begins another program, it holds nothing of its own that is worth counting."""
    total = 0
    try:
        command = own.cmdline()
        for child in own.children(recursive=True)[:CHILDREN_LOOKED_AT]:
            try:
                if child.cmdline() == command:
                    continue
                total += _kept(Path(f"/proc/{child.pid}/status")) or child.memory_info().rss
            except psutil.Error:  # it has ended
                continue
    except psutil.Error:
        pass
    return total


def _cuda() -> Any:
    """torch.cuda, where a GPU is in use; torch is not imported for that."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _device_peak() -> int:
    cuda = _cuda()
    return sum(map(cuda.max_memory_allocated, range(cuda.device_count()))) if cuda is not None else 0


def device_held() -> int:
    """What torch holds now on this process's GPUs; 0 where none is in use."""
    cuda = _cuda()
    return sum(map(cuda.memory_allocated, range(cuda.device_count()))) if cuda is not None else 0


def available(device: Any = "cpu") -> int:
    """Memory that this process can still take on a device: of the machine, the smaller of what is free and what is left of the
    limit of its control group (a container's, a job's); of a GPU, what is free."""
    if _is_cuda(device):
        import torch

        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    left = [limit - used for limit, used in limits()]
    return max(0, min([psutil.virtual_memory().available, *left]))


def spare(device: Any = "cpu") -> int:
    """Memory that activations can take on a device. A file that is mapped, as weights are, counts as free for the system, and
    is not: what this process holds is no room. Processes on one machine share its memory; each has a GPU of its own."""
    if _is_cuda(device):
        return available(device)
    return max(0, min(available(device), capacity(device) - resident())) // on_this_machine()


def capacity(device: Any = "cpu") -> int:
    """Memory that a device has in all, within the limit of this process's control group."""
    if _is_cuda(device):
        import torch

        return torch.cuda.mem_get_info(device)[1]
    return in_all()


def _is_cuda(device: Any) -> bool:
    return str(device).partition(":")[0] == "cuda"


def keep_apart(model: Any) -> bool:
    """On glibc, before work with a model of at least BIG bytes in the machine's memory: from now on every allocation of a MiB
    or more has pages of its own, which go back to the system when it is freed. glibc does so for the first ones, then puts ever
    larger ones (up to 32 MiB) into the heap, where activations of many sizes leave gaps that stay resident. Returns whether it
    was done: with a smaller model the gaps are small, and new pages cost time; elsewhere there is no such setting. It cannot be
    taken back, so it is done in processes of the command line alone."""
    if (
        not processes.of_the_command_line
        or sys.platform != "linux"
        or model.device.type != "cpu"
        or sum(p.nbytes for p in model.parameters()) < BIG
    ):
        return False
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    return setting is not None and setting(M_MMAP_THRESHOLD, APART) == 1


def trim() -> None:
    """Give freed memory back to the system, as far as its allocator can."""
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        function(0)


def free_disk(folder: str | Path) -> int:
    """Free space of the disk that a folder is on, or is going to be on."""
    folder = Path(folder).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size(number: float) -> str:
    """A number of bytes as a person would say it: 512 KiB, 3.1 MiB, 14.5 GiB."""
    if number < 2**20:
        return f"{number / 2**10:.0f} KiB"
    return f"{number / 2**20:.1f} MiB" if number < 2**30 else f"{number / 2**30:.1f} GiB"
