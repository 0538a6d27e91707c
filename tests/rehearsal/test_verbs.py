"""Whole verbs on a GPU that is none, whose tensors have values: nothing meets on two devices, what comes out is what comes out
on a CPU, and the host waits where it is known to."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def rehearse(*what: str) -> list[dict]:
    command = [sys.executable, "-m", "tests.rehearsal.verbs", *what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
