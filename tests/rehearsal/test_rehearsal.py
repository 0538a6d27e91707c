"""Every verb's forward and backward pass on a GPU that is none, and what the rehearsal finds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rehearse(*what: str) -> list[list[str]]:
    """The lines of a rehearsal of families and dtypes: one for each, every kind and verb, then one for everything planted."""
    command = [sys.executable, "-m", "tests.rehearsal.rehearse", *what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def quick():
    return rehearse("mamba2", "float32", "bfloat16")


def test_nothing_goes_wrong(quick):
    """No tensor on another device, no look at a value, no product by weights in float32 where the model is in 16 bits, and no
    tensor made on the host in a step of decoding."""
    ran = [line for line in quick if line[0] != "planted"]
    assert len(ran) == 2 * 3 * 2
    assert {line[-1] for line in ran} == {"ok"}, [line for line in ran if line[-1] != "ok"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cpu", "RehearsalError: _to_copy copies from the device to the host"),
        ("elsewhere", "Expected all tensors to be on the same device"),
        ("sync", "RehearsalError: _local_scalar_dense waits for the device"),
        ("float32", "RehearsalError: mm computes in float32 in a model of torch.bfloat16"),
        ("list", "makes a tensor on the host"),
    ],
)
def test_what_is_planted_is_found(quick, fault, message):
    (found,) = [line[-1] for line in quick if line[:2] == ["planted", fault]]
    assert message in found


@pytest.mark.slow
def test_nothing_goes_wrong_in_any_family():
    ran = [line for line in rehearse() if line[0] != "planted"]
    assert len(ran) == 4 * 2 * 3 * 3
    assert {line[-1] for line in ran} == {"ok"}, [line for line in ran if line[-1] != "ok"]
