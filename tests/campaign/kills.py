"""A campaign of interruptions: every verb that writes is killed, signalled, or finds the disk full or read-only, goes on, and
has to end with the same files as if nothing had happened.

    python -m tests.campaign.kills [--quick]     # as often as it takes: it goes on where it was stopped

In a trial one call of the command line meets one or two faults (faults.py) at calls that change files, or at random moments.
After each, an export is the old folder or the new; a signal or a disk gives one line and no traceback, and what the line of a
signal names goes on. What a disk that became read-only keeps of an earlier folder, after its call was done, is named, and gone
after the next. In the end the files are those of an uninterrupted call, bit for bit but for times, and nothing else lies there.
Results are appended to a file, one a line; the record is made from it.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.campaign import faults, trials
from tests.campaign.faults import Fault
from tests.campaign.verdicts import complaints, left_over, part, standing

WORK = (trials.ROOT / "runs" / "campaign" / "kills").resolve()
RECORD = trials.ROOT / "recipes" / "kills.json"
SHARES = {"kill": 50, "tear": 12, "moment": 12, "term": 6, "int": 6, "full": 8, "read-only": 6}  # of a hundred faults
AGAIN = 0.15  # how often what goes on is interrupted once more
IMPORTED = ("costs.run", "commands.tune_hybrid", "commands.comparison", "commands.hybrid_folder", "studies.prune_model",
            "studies.conduct", "exporting.export", "pretraining.pretrain")  # fmt: skip
QUICK = ("locate", "plan over an earlier", "splice over an earlier", "tune, early stopping", "tune, LoRA", "bench",
         "pretrain over an earlier", "export, patch over an earlier", "run", "run over an earlier")  # fmt: skip


@dataclass(frozen=True)
class Trial:
    number: int
    case: str
    faults: list[Fault]


@dataclass(frozen=True)
class Reference:
    """An uninterrupted call: what it leaves, how many calls change files, and how long it takes."""

    files: dict[str, str]
    calls: int
    seconds: float


def main() -> None:
    given = trials.options(__doc__, 1000, 30)
    inputs, known, references = ready(QUICK if given.quick else None)
    shares = {kind: share for kind, share in SHARES.items() if not (given.quick and kind == "moment")}  # CI knows no chance
    drawn = draw(references, given.trials, given.seed, shares)

    def trial(number: int) -> trials.Line:
        chosen = drawn[number]
        return one(chosen, known[chosen.case], references[chosen.case], inputs, WORK / "trials" / str(number))

    if lines := trials.conduct(trial, given, WORK / f"results-{given.seed}.jsonl"):
        trials.write_record(record(lines, given.seed), RECORD)


def ready(names: Sequence[str] | None) -> tuple[Path, dict[str, Any], dict[str, "Reference"]]:
    """What a campaign begins with: the folder of inputs, the calls of these names, or all, and how each ends undisturbed."""
    faults.preloaded(WORK)
    inputs = warm_up(WORK)
    from tests.campaign.calls import cases

    known = {case.name: case for case in cases(inputs) if names is None or case.name in names}
    return inputs, known, {name: reference(case, inputs, WORK) for name, case in known.items()}


def warm_up(work: Path) -> Path:
    """Import what the verbs use and do a run once, so that no trial has to; make the inputs, and return their folder."""
    for verb in IMPORTED:
        importlib.import_module(f"surgery.{verb}")
    from tests.campaign.calls import prepare, settings
    from tests.campaign.stand_ins import stand_in

    stand_in()
    inputs = work / "inputs"

    def call(*arguments: str) -> None:
        ended = faults.surgery(list(arguments), inputs)
        assert ended.status == 0, ended.said

    prepare(inputs, call)
    from surgery.cli.app import main as cli

    place, before = work / "warm", Path.cwd()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    os.chdir(place)
    out, err = os.dup(1), os.dup(2)
    with (place / "said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    try:
        sys.argv = ["surgery", "run", str(inputs / "run.yaml"), "--out", "out", *settings(["bench.controls=false"])]
        with contextlib.suppress(SystemExit):
            cli()
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(before)
    gc.collect()
    gc.freeze()
    return inputs


def place_for(case: Any, inputs: Path, folder: Path) -> None:
    """The folder as it is before the call."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source, target in case.before.items():
        copy = shutil.copytree if (inputs / source).is_dir() else shutil.copy
        copy(inputs / source, folder / target)


def reference(case: Any, inputs: Path, work: Path) -> Reference:
    """From its file, or a call. (If two of them did not leave the same, the first trials would say so.)"""
    from surgery.records.record import code_digest
    from tests.campaign.sameness import content

    path = work / "references" / f"{case.name}.json"
    if path.exists() and (held := json.loads(path.read_text())).pop("code") == code_digest():
        return Reference(**held)
    folder, log = work / "trials" / "reference", work / "calls"  # as deep as the trials: exports name their base from there
    place_for(case, inputs, folder)
    log.unlink(missing_ok=True)
    ended = faults.surgery(case.arguments, folder, Fault("count"), log)
    assert ended.status == 0, f"{case.name}: {ended.said}"
    made = Reference(content(folder), len(log.read_text().splitlines()), ended.seconds)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**asdict(made), "code": code_digest()}))
    return made


def draw(references: dict[str, Reference], count: int, seed: int, shares: dict[str, int] = SHARES) -> list[Trial]:
    """The trials of a seed. Calls that change more files come more often, whole runs, which take longest, half as often, and no
    place is taken twice before all were."""
    rng = random.Random(seed)
    weights = {name: made.calls**0.5 / (2 if name.startswith("run") else 1) for name, made in references.items()}
    places: dict[str, list[int]] = {name: [] for name in references}
    drawn = []
    for number in range(count):
        (name,) = [list(references)[number]] if number < len(references) else rng.choices(list(weights), list(weights.values()))
        chosen = []
        for _ in range(1 + (rng.random() < AGAIN)):
            (kind,) = rng.choices(list(shares), list(shares.values()))
            if not places[name]:
                places[name] = rng.sample(range(1, references[name].calls + 1), references[name].calls)
            at = rng.random() if kind == "moment" else places[name].pop()
            chosen.append(Fault(kind, at))
        drawn.append(Trial(number, name, chosen))
    return drawn


def one(trial: Trial, case: Any, expected: Reference, inputs: Path, folder: Path) -> dict[str, Any]:
    """A trial. Its folder is kept where something failed."""
    from surgery.records.record import code_digest
    from tests.campaign.sameness import content, differences

    start = time.monotonic()
    place_for(case, inputs, folder)
    old = content(folder)
    arguments, failures, struck, ended = case.arguments, list[str](), list[str](), None
    for fault in trial.faults:
        met = replace(fault, at=fault.at * expected.seconds) if fault.kind == "moment" else fault
        ended = faults.surgery(arguments, folder, met)
        failures += complaints(fault, ended)
        if ended.status == 0:
            if fault.kind == "read-only" and (left := left_over(folder, expected.files)):  # it could not be removed any more
                failures += [f"{name} stays, and nothing says so" for name in left if name not in ended.said]
                arguments, ended = case.goes_on, None
            break
        struck.append(fault.kind)
        if case.out is not None:
            now = standing(folder / case.out)
            emptied = case.arguments[0] == "run"  # --overwrite removes a run before it begins; other verbs replace a folder
            known = [part(old, case.out), part(expected.files, case.out), *([{}] if emptied or not part(old, case.out) else [])]
            if now not in known:
                failures.append(f"after {fault.kind} at {fault.at:g} {case.out} is neither the old folder nor the new")
        arguments = case.goes_on
        if (
            fault.kind in faults.SIGNALS and "to go on: " in ended.said and arguments[0] not in ("splice", "export")
        ):  # which may have been done, too
            arguments = shlex.split(ended.said.rpartition("to go on: ")[2])[1:]
    if ended is None or ended.status != 0:
        ended = faults.surgery(arguments, folder)
        if ended.status != 0 or ended.traceback:
            failures.append(f"what goes on ended with {ended.status}: {ended.said[-600:]}")
    failures += differences(expected.files, content(folder))
    if not failures:
        shutil.rmtree(folder)
    return {
        "number": trial.number, "of": trial.case, "faults": [(fault.kind, fault.at) for fault in trial.faults],
        "struck": struck, "failures": failures, "seconds": round(time.monotonic() - start, 2), "code": code_digest(),
    }  # fmt: skip


def record(lines: list[trials.Line], seed: int) -> trials.Line:
    """recipes/kills.json. codes: digest of the package's sources -> how many trials it met, if it was changed between calls of
    the campaign."""
    from surgery.records.record import environment

    return {
        "environment": environment().model_dump(), "seed": seed, "codes": dict(Counter(line["code"] for line in lines)),
        "trials": len(lines), "interruptions": sum(len(line["struck"]) for line in lines),
        "by_kind": dict(sorted(Counter(kind for line in lines for kind in line["struck"]).items())),
        "by_call": dict(sorted(Counter(line["of"] for line in lines for _ in line["struck"]).items())),
        "ended_before": sum(not line["struck"] for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines)),
        "failures": [line for line in lines if line["failures"]],
    }  # fmt: skip


if __name__ == "__main__":
    main()
