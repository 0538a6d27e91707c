"""Whole verbs on a GPU that is none, whose tensors have values: nothing meets on two devices, what comes out is what comes out
on a CPU, and the host waits where it is known to."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DTYPES = ("float32", "float16", "bfloat16")
# A step of tuning looks at its losses and at the norm of its gradient, once each, and at where its targets are.
STEP = {"surgery/tuning/descent.py", "surgery/tuning/distil.py"}


@cache
def rehearse(*what: str) -> list[dict]:
    """The lines of a rehearsal of verbs in dtypes, and of what is planted."""
    command = [sys.executable, "-m", "tests.rehearsal.verbs", *what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def quick() -> list[dict]:
    return rehearse("bfloat16", "splice", "tune")


def check(lines: list[dict]) -> None:
    for line in lines:
        assert line["outcome"] == "ok", line
        assert line["apart"] == 0, line


def test_verbs_run_and_give_what_they_give_on_a_cpu():
    check([line for line in quick() if "verb" in line])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cpu", "_to_copy waits for the device"),
        ("elsewhere", "Expected all tensors to be on the same device"),
        ("sync", "_local_scalar_dense waits for the device"),
        ("float32", "computes in float32 in a model of 16 bits"),
    ],
)
def test_what_is_planted_is_found(fault, message):
    (found,) = [line["outcome"] for line in quick() if line.get("planted") == fault]
    assert message in found


def test_what_a_step_of_tuning_waits_for():
    """Twice for numbers: for all losses together, and for the norm of the gradient."""
    (line,) = [line for line in quick() if line.get("verb") == "tune"]
    steps = 3
    waits = {where: count for where, count in line["counted"].items() if where.startswith("sync surgery/tuning/descent.py")}
    assert sorted(waits.values()) == [steps, steps], line["counted"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_verb_in_every_dtype(dtype):
    check([line for line in rehearse(dtype) if "verb" in line])
