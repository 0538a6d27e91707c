"""A verb on a GPU that is none, whose tensors have values: nothing meets on two devices, what comes out is what comes out on a
CPU, and inside a model the host does not wait."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def rehearse(*what: str) -> list[dict]:
    """The lines of a rehearsal of verbs in dtypes, and of what is planted."""
    command = [sys.executable, "-m", "tests.rehearsal.verbs", *what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def quick() -> list[dict]:
    return rehearse("float32", "bfloat16", "splice")


def check(lines: list[dict]) -> None:
    """torch's attention has other kernels on a CPU, and where a gradient is next to nothing, Adam makes a whole step of
    rounding (a learning rate's worth, in each of three steps). In 16 bits it is enough that a verb comes to its end."""
    assert lines
    for line in lines:
        assert line["outcome"] == "ok", line
        bound = 1e-2 if line["verb"].startswith("tune") else 1e-4
        assert line["dtype"] != "float32" or line["apart"] < bound, line


def test_splicing_runs_and_ends():
    check([line for line in quick() if "verb" in line])


ENDED = ("plan", "tune", "sweep", "prune", "bench", "tune lora", "tune stages", "tune checkpointing", "locate exact")


@pytest.mark.slow  # a process each
@pytest.mark.parametrize("verb", ENDED)
def test_another_verb_runs_and_ends(verb):
    check([line for line in rehearse("float32", verb) if "verb" in line])


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
