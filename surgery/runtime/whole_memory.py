"""The memory that this process may have in all: of the machine, within the limits of its control groups (a container's, a
job's). Nothing is imported for it, as files are read at every start. All figures are bytes."""

import os
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def in_all() -> int:
    """What the machine has, or the smallest limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in limits())])


def limits() -> list[tuple[int, int]]:
    """(limit, used) of every control group of this process that has a limit. Pages of files that the system may drop at any
    time are not counted as used."""
    result = []
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers:  # version 2
            roots, names = [GROUPS, GROUPS / "unified"], ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            roots = [GROUPS / "memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for root in roots:
            group = root / path.strip("/")
            for folder in [group, *group.parents]:  # in a container its own group may be the root
                if not folder.is_relative_to(root):
                    break
                if (entry := _limit(folder, *names)) is not None:
                    result.append(entry)
    return result


def _limit(folder: Path, limit: str, usage: str, reclaimable: str) -> tuple[int, int] | None:
    try:
        maximum, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        statistics = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not maximum.isdigit() or int(maximum) >= 2**60:  # "max", or version 1's way to say so
        return None
    freed = sum(int(line.split()[1]) for line in statistics if line.split()[:1] == [reclaimable])
    return int(maximum), max(0, used - freed)
