"""What the campaigns share: trials are dealt out to forked processes, and each leaves a line of JSON in a file, so that the
next call goes on where one was stopped."""

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Line = dict[str, Any]


def options(doc: str | None, count: int, quick: int, seed: int = 0) -> argparse.Namespace:
    """Those of the command line, the same for every campaign. count, quick: how many trials there are, and with --quick."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, help=f"how many: {count}, or with --quick {quick}")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--quick", action="store_true", help="as in CI: fewer, all of them again, and no record")
    parser.add_argument("--seconds", type=float, help="begin no trial after this many; the next call goes on")
    parser.add_argument("--only", type=int, help="this trial alone, once more")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    given.trials = given.trials or (quick if given.quick else count)
    return given


def read(results: Path) -> list[Line]:
    """The lines of the file; one that is not whole, since the campaign itself was killed, is left out."""
    lines = []
    for line in results.read_text().splitlines() if results.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def conduct(one: Callable[[int], Line], given: argparse.Namespace, results: Path) -> list[Line]:
    """Do what is left of the trials, side by side, and say what failed. Returns the lines that belong into a record: of all, or
    none where some are left or were chosen. Ends the process with status 1 where something failed.

    one: number -> the line of its trial, with its `number`, what it is `of`, and `failures` in words.
    """
    begun, numbers = time.monotonic(), [given.only] if given.only is not None else list(range(given.trials))
    if given.quick or given.only is not None:
        results = results.with_name(f"again-{results.name}")
        results.unlink(missing_ok=True)
    done = {line["number"] for line in read(results)}
    todo = [number for number in numbers if number not in done]
    sys.stdout.flush()
    children = []
    for worker in range(given.workers):
        if (child := os.fork()) == 0:
            _work(todo[worker :: given.workers], one, results, begun + (given.seconds or float("inf")))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    lines = sorted((line for line in read(results) if line["number"] in {*numbers}), key=lambda line: line["number"])
    failed = [line for line in lines if line["failures"]]
    for line in failed:
        print(f"trial {line['number']} ({line['of']}): {'; '.join(line['failures'])}")
    whole = len(lines) == len(numbers)
    print(f"{len(lines)} of {len(numbers)} trials, {len(failed)} failed, {time.monotonic() - begun:.0f} s", flush=True)
    if failed or not (whole or given.seconds):
        sys.exit(1)
    return lines if whole and not given.quick and given.only is None else []


def _work(numbers: list[int], one: Callable[[int], Line], results: Path, end: float) -> None:
    """Of a process that ends here."""
    status = 1
    try:
        for number in numbers:
            if time.monotonic() > end:
                break
            line = json.dumps(one(number))
            with results.open("a") as file:
                file.write(line + "\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def write_record(record: Line, path: Path) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"the record: {path}")
