"""What is wrong with how an interrupted call ended, and with what it left."""

import re
from pathlib import Path

from surgery.runtime.ownership.folder import RECORD, OwnedFolder
from tests.campaign.faults import Ended, Fault
from tests.campaign.sameness import content

STRUCK = {"kill": -9, "tear": -9, "moment": -9, "term": 143, "int": 130, "full": 2, "read-only": 2}  # the exit status


def part(files: dict[str, str], folder: str) -> dict[str, str]:
    """Of a tree's files, those below a folder."""
    return {name.removeprefix(f"{folder}/"): digest for name, digest in files.items() if name.startswith(f"{folder}/")}


def standing(out: Path) -> dict[str, str]:
    """The files of the folder `out`. Where no two folders can be exchanged in one step, it may have a hidden name for a moment,
    and the next call takes it back from there."""
    hidden = [path for path in out.parent.glob(f".{out.name}-new-*") if (path / RECORD).exists()] if out.parent.exists() else []
    beside = [path for path in hidden if OwnedFolder(path).hidden("leaving")]
    place = next((path for path in (out, *beside) if path.exists()), None)
    return content(place) if place else {}


def left_over(folder: Path, expected: dict[str, str]) -> list[str]:
    """What lies below a folder and not among the expected files (content), the outermost names alone."""
    known = {str(above) for name in expected for above in (Path(name), *Path(name).parents)}
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*"))]
    return [str(path) for path in paths if str(path) not in known and str(path.parent) in known]


def complaints(fault: Fault, ended: Ended) -> list[str]:
    """What is wrong with how an interrupted call ended. It may have been done before the fault."""
    where = f"{fault.kind} at {fault.at:g}"
    wrong = [f"{where}: a traceback: {ended.said[-2500:]}"] if ended.traceback else []
    if ended.status not in (0, STRUCK[fault.kind]):
        wrong.append(f"{where}: status {ended.status}: {ended.said[-600:]}")
    elif ended.status > 0 and len(re.findall(r"^surgery: .", ended.said, re.MULTILINE)) != 1:
        wrong.append(f"{where}: not one line of complaint: {ended.said[-600:]}")
    return wrong
