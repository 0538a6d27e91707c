"""A campaign of neighbours: every verb that writes works among files that are not its own, and all of them survive it.

    python -m tests.campaign.neighbours [--quick]     # as often as it takes: it goes on where it was stopped

In a trial the output, what is below it, its parent and its neighbours hold random files of a user's: with names of ours and
like ours, records of ours and like ours, files of ours that were edited, links, other modes. While one call of the command line
works, more of them appear. Some calls are killed, signalled, or find the disk full. The call goes on afterwards. At the end
every one of these files is there, byte for byte and mode for mode, and every link leads where it led.
"""

import json
import os
import random
import shutil
import stat
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.campaign import faults, kills, trials
from tests.campaign.faults import Fault

RECORD = trials.ROOT / "recipes" / "neighbours.json"
NAMES = (
    "thesis.txt", "model.safetensors", "config.json", "plan.json", "ranking.json", "report.json", "run.json", "export.json",
    "recipe.yaml", "README.md", "tuning.json", "lora.txt", "llamba.py", "checkpoint-2/state.json", "checkpoint-best/model.pt",
    "checkpoint-1-mine/x", ".checkpoint-2-new-01234567/state.json", ".out-new-0123abcd/config.json", ".out-old/photo.jpg",
    ".plan.json-new-01234567", "hybrid/notes.txt", "locate/thesis.txt", "cells/mine.json", "adapter/adapter_config.json",
    "tuning/tuned/mine.txt", "seed-data/x", "jobs/x", "bases/x", "planning/x", "out-tuning/notes.txt", "out-pretraining/x",
)  # fmt: skip
LIKE_OURS = (
    b'{"version": 3}', b'{"files": {"*": ""}}', b"{}", b"", b'{"mamba-surgery": 1, "token": "0", "seal": "0"}\n',
    b"\0\xff" * 99,
)  # fmt: skip
MODES = (0o600, 0o644, 0o444, 0o755, 0o400)
SHARES = {"none": 55, "kill": 15, "moment": 10, "term": 8, "full": 8, "read-only": 4}  # of a hundred calls
QUICK = ("locate", "plan over an earlier", "splice over an earlier", "tune", "export, patch over an earlier",
         "run over an earlier", "pretrain over an earlier")  # fmt: skip
Files = dict[str, tuple[str, int, bytes]]


def main() -> None:
    given = trials.options(__doc__, 500, 21)
    inputs, known, references = kills.ready(QUICK if given.quick else None)

    def trial(number: int) -> trials.Line:
        return one(number, given.seed, known, references, inputs, kills.WORK / "neighbours" / str(number))

    if lines := trials.conduct(trial, given, kills.WORK / f"neighbours-{given.seed}.jsonl"):
        trials.write_record(record(lines, given.seed), RECORD)


def one(number: int, seed: int, known: dict, references: dict, inputs: Path, folder: Path) -> dict[str, Any]:
    """A trial. Its folder is kept where something failed."""
    rng = random.Random(f"{seed} {number}")
    start = time.monotonic()
    case = known[list(known)[number]] if number < len(known) else known[rng.choice(list(known))]
    expected = references[case.name]
    kills.place_for(case, inputs, folder)
    inside = rng.random() < 0.4  # else nothing is in the way, and the call does its work
    ours = edit(rng, folder, inside)
    scatter(rng, folder, rng.randrange(1, 7), inside)
    theirs = held(folder, ours)
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
    fault = Fault(kind, rng.random() * expected.seconds if kind == "moment" else rng.randint(1, max(1, expected.calls)))
    writer = meanwhile(rng, folder, expected.seconds)
    ended = faults.surgery(case.arguments, folder, fault)
    again = faults.surgery(case.goes_on, folder) if ended.status != 0 or rng.random() < 0.3 else ended
    theirs |= written(writer, folder)
    failures = [f"a traceback: {each.said[-1500:]}" for each in (ended, replace(again)) if each.traceback][:1]
    now = {name: look(folder / name) for name in theirs}
    failures += [f"{name} {'is gone' if now[name] is None else 'changed'}" for name in theirs if now[name] != theirs[name]]
    if not failures:
        for place, _, _ in os.walk(folder):
            os.chmod(place, 0o755)
        shutil.rmtree(folder)
    return {
        "number": number, "of": case.name, "fault": kind, "status": [ended.status, again.status], "files": len(theirs),
        "failures": failures, "seconds": round(time.monotonic() - start, 2),
    }  # fmt: skip


def edit(rng: random.Random, folder: Path, inside: bool) -> set[Path]:
    """What lies there before the call is ours. Sometimes a file of it is edited, and is the user's from then on. Returns what
    is ours still."""
    before = {path for path in folder.rglob("*") if path.is_file()}
    files = sorted(path for path in before if not path.name.startswith("."))
    edited = rng.sample(files, min(len(files), rng.choice((0, 1, 2)) if inside else 0))
    for path in edited:
        content = path.read_bytes()
        path.write_bytes(rng.choice((content + b" ", content[:-1], b"edited by hand")))
    return before - {*edited}


def scatter(rng: random.Random, folder: Path, count: int, inside: bool) -> None:
    """Files of a user's, wherever none lies yet. inside: in the output, too, else beside it alone."""
    for _ in range(count):
        places = [folder, folder / "out", *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())]
        path = rng.choice(places[:2] * 3 + places) / rng.choice(NAMES)
        name = path.relative_to(folder).as_posix()
        if not inside and (name.startswith("out") or name == "plan.json"):
            continue
        if os.path.lexists(path) or any(os.path.lexists(above) and not above.is_dir() for above in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = rng.random()
        if kind < 0.15:
            path.symlink_to(rng.choice((folder / "vault" / "kept.txt", Path("nowhere"), folder / "vault")))
            (folder / "vault").mkdir(exist_ok=True)
            (folder / "vault" / "kept.txt").write_text("kept")
            continue
        records = sorted(folder.rglob(".mamba-surgery"))
        if kind < 0.25 and records:
            path = path.with_name(".mamba-surgery")
            if os.path.lexists(path):
                continue
            path.write_bytes(rng.choice(records).read_bytes())
        else:
            path.write_bytes(rng.choice((*LIKE_OURS, rng.randbytes(40))))
        path.chmod(rng.choice(MODES))


def held(folder: Path, ours: set[Path]) -> Files:
    """All that lies below a folder and is not ours."""
    found = {path: look(path) for path in folder.rglob("*") if path not in ours}
    return {path.relative_to(folder).as_posix(): seen for path, seen in found.items() if seen is not None}


def look(path: Path) -> tuple[str, int, bytes] | None:
    """What there is: its kind, its mode, its content."""
    if path.is_symlink():
        return "link", 0, os.fsencode(os.readlink(path))
    if not path.is_file():
        return None
    return "file", stat.S_IMODE(path.stat().st_mode), path.read_bytes()


def meanwhile(rng: random.Random, folder: Path, seconds: float) -> int:
    """A process of the user's, who saves files while the call works; what it saved is in a file beside the folder."""
    moments = sorted(rng.random() * seconds for _ in range(rng.choice((0, 1, 3))))
    numbers = [rng.random() for _ in moments]
    child = os.fork()
    if child:
        return child
    log, begun = [], time.monotonic()
    try:
        for moment, number in zip(moments, numbers, strict=True):
            time.sleep(max(0.0, begun + moment - time.monotonic()))
            places = [folder, *(Path(at) for at, _, _ in os.walk(folder) if "-new-" not in at)]
            path = places[int(number * len(places))] / f"saved-{number:.6f}.txt"
            try:
                with path.open("x") as file:
                    file.write(str(number))
            except OSError:  # the folder is gone by now
                continue
            log.append((path.relative_to(folder).as_posix(), str(number)))
    finally:
        folder.with_suffix(".log").write_text(json.dumps(log))
        os._exit(0)


def written(writer: int, folder: Path) -> Files:
    os.waitpid(writer, 0)
    log = folder.with_suffix(".log")
    saved = json.loads(log.read_text())
    log.unlink()
    umask = os.umask(0)
    os.umask(umask)
    return {name: ("file", 0o666 & ~umask, text.encode()) for name, text in saved}


def record(lines: list[trials.Line], seed: int) -> trials.Line:
    """recipes/neighbours.json."""
    from surgery.records.record import environment

    return {
        "environment": environment().model_dump(), "seed": seed, "trials": len(lines),
        "files": sum(line["files"] for line in lines),
        "by_fault": dict(sorted(Counter(line["fault"] for line in lines).items())),
        "by_call": dict(sorted(Counter(line["of"] for line in lines).items())),
        "refused": sum(2 in line["status"] for line in lines), "seconds": round(sum(line["seconds"] for line in lines)),
        "failures": [line for line in lines if line["failures"]],
    }  # fmt: skip


if __name__ == "__main__":
    main()
