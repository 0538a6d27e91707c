"""The process of a rehearsal."""

import json
import subprocess
import sys

import pytest

from tests.models import ROOT


def rehearse(*asked: str) -> list[dict]:
    """The lines that a rehearsal prints."""
    command = [sys.executable, "-m", "tests.rehearsal.verbs", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def quick() -> list[dict]:
    return rehearse("float32", "bfloat16", "mamba2", "splice", "packed rows")
