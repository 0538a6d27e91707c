"""The processes of the rehearsals."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def rehearse(module: str, *asked: str) -> list:
    """The lines that a rehearsal prints."""
    command = [sys.executable, "-m", f"tests.rehearsal.{module}", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def quick() -> list:
    """Of models lists, of verbs dictionaries."""
    return rehearse("quick")
