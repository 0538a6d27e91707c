"""A campaign of interruptions: every verb that writes is killed, signalled, or finds the disk full or read-only, goes on, and
has to end with the same files as if nothing had happened.

    python -m tests.campaign.kills --trials 1000 --seed 0     # as often as it takes: it goes on where it was stopped
    python -m tests.campaign.kills --quick

In a trial one call of the command line meets one or two faults (faults.py) at calls that change files, or at random moments.
After each, an export is the old folder or the new; a signal or a disk gives one line and no traceback, and what the line of a
signal names goes on. What a disk that became read-only keeps of an earlier folder, after its call was done, is named, and gone
after the next. In the end the files are those of an uninterrupted call, bit for bit but for times, and nothing else lies there.
Results are appended to a file, one a line; the record is made from it.
"""

import argparse
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
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.campaign import faults
from tests.campaign.faults import Fault
from tests.campaign.verdicts import complaints, left_over, part, standing

ROOT = Path(__file__).parents[2]
WORK, RECORD = ROOT / "runs" / "campaign" / "kills", ROOT / "recipes" / "kills.json"
SHARES = {"kill": 50, "tear": 12, "moment": 12, "term": 6, "int": 6, "full": 8, "read-only": 6}  # of a hundred faults
AGAIN = 0.15  # how often what goes on is interrupted once more
IMPORTED = ("jobs.run", "jobs.tune_hybrid", "jobs.comparison", "jobs.prune_model", "studies.conduct", "exporting.export",
            "exporting.source", "pretraining.pretrain")  # fmt: skip
QUICK = ("locate", "plan over an earlier", "splice over an earlier", "tune, stages", "tune, LoRA", "bench",
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
    options = _options()
    work = options.work.resolve()
    faults.preloaded(work)
    start = time.monotonic()

    def took() -> int:
        return round(time.monotonic() - start)

    inputs = warm_up(work)
    from tests.campaign.calls import cases

    known = {case.name: case for case in cases(inputs) if not options.quick or case.name in QUICK}
    end = start + options.seconds if options.seconds else float("inf")
    references = {}
    for name, case in known.items():
        references[name] = reference(case, inputs, work)
        if time.monotonic() > end:
            print(f"{len(references)} of {len(known)} uninterrupted calls are done; call it again", flush=True)
            return
    shares = {kind: share for kind, share in SHARES.items() if not (options.quick and kind == "moment")}  # CI knows no chance
    trials = draw(references, options.trials, options.seed, shares)
    results = work / f"results-{options.seed}.jsonl"
    if options.quick or options.trial is not None:
        results = work / "results-alone.jsonl"
        results.unlink(missing_ok=True)
    if options.trial is not None:
        trials = [trials[options.trial]]
    done = {line["number"] for line in read(results)}
    todo = [trial for trial in trials if trial.number not in done]
    print(f"{len(trials)} trials of {len(known)} calls, {len(done)} done before; ready after {took()} s", flush=True)
    workers = []
    for worker in range(options.workers):
        if (child := os.fork()) == 0:
            work_through(todo[worker :: options.workers], known, references, inputs, work, results, end)
        workers.append(child)
    for child in workers:
        os.waitpid(child, 0)
    lines = read(results)
    failures = [line for line in lines if line["failures"]]
    for line in failures:
        print(f"trial {line['number']} ({line['case']}, {line['faults']}): {'; '.join(line['failures'])}")
    struck = sum(len(line["struck"]) for line in lines)
    print(f"{struck} interruptions in {len(lines)} of {len(trials)} trials, {len(failures)} failures, {took()} s")
    if len(lines) == len(trials) and not options.quick and options.trial is None:
        write_record(lines, options.seed)
    sys.exit(bool(failures) or (len(lines) < len(trials) and not options.seconds))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="50 trials of a part of the calls, as in CI")
    parser.add_argument("--seconds", type=float, help="begin no trial after this many; the next call goes on")
    parser.add_argument("--trial", type=int, help="this one alone, once more")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    options.trials = options.trials or (50 if options.quick else 1000)
    return options


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
    trials = []
    for number in range(count):
        (name,) = [list(references)[number]] if number < len(references) else rng.choices(list(weights), list(weights.values()))
        chosen = []
        for _ in range(1 + (rng.random() < AGAIN)):
            (kind,) = rng.choices(list(shares), list(shares.values()))
            if not places[name]:
                places[name] = rng.sample(range(1, references[name].calls + 1), references[name].calls)
            at = rng.random() if kind == "moment" else places[name].pop()
            chosen.append(Fault(kind, at))
        trials.append(Trial(number, name, chosen))
    return trials


def work_through(
    trials: list[Trial], known: dict, references: dict[str, Reference], inputs: Path, work: Path, results: Path, end: float
) -> None:
    """In a process of its own, which ends here."""
    status = 1
    try:
        for trial in trials:
            if time.monotonic() > end:
                break
            line = one(trial, known[trial.case], references[trial.case], inputs, work / "trials" / str(trial.number))
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


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
        "number": trial.number, "case": trial.case, "faults": [(fault.kind, fault.at) for fault in trial.faults],
        "struck": struck, "failures": failures, "seconds": round(time.monotonic() - start, 2), "code": code_digest(),
    }  # fmt: skip


def read(results: Path) -> list[dict[str, Any]]:
    """The lines of the file; one that is not whole, since the campaign itself was killed, is left out."""
    lines = []
    for line in results.read_text().splitlines() if results.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def write_record(lines: list[dict[str, Any]], seed: int) -> None:
    """recipes/kills.json. codes: digest of the package's sources -> how many trials it met, if it was changed between calls of
    the campaign."""
    from surgery.records.record import environment

    kinds = Counter(kind for line in lines for kind in line["struck"])
    calls = Counter(line["case"] for line in lines for _ in line["struck"])
    record = {
        "environment": environment().model_dump(), "seed": seed, "codes": dict(Counter(line["code"] for line in lines)),
        "trials": len(lines),
        "interruptions": sum(len(line["struck"]) for line in lines),
        "by_kind": dict(sorted(kinds.items())), "by_call": dict(sorted(calls.items())),
        "ended_before": sum(not line["struck"] for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines)),
        "failures": [line for line in lines if line["failures"]],
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(f"the record: {RECORD}")


if __name__ == "__main__":
    main()
