"""The campaign of kills itself: faults befall the call that they are for, and no difference is missed."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.campaign import kills
from tests.campaign.calls import Case
from tests.campaign.faults import NUMBERS, SIGNALS, SOURCE, Ended, Fault
from tests.campaign.kills import Reference, Trial
from tests.campaign.sameness import content, differences
from tests.campaign.verdicts import complaints

# Calls below the folder: open, write, rename of each file; two writes of the second. Outside of it nothing counts.
WRITES = """
import ctypes, os, sys
number, at, signal, log = sys.argv[1:]
ctypes.CDLL(None).faults_arm(os.getcwd().encode(), int(number), ctypes.c_long(int(at)), int(signal), log.encode() or None)
open("/dev/null", "w").write("x")
for name in "ab":
    with open(f".{name}", "wb", buffering=0) as file:
        for part in (b"first ", b"second ")[: 1 + (name == "b")]:
            file.write(part)
    os.rename(f".{name}", name)
print("done")
"""
CALLS = ["open /.a", "write /.a", "rename /a", "open /.b", "write /.b", "write /.b", "rename /b"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "faults.so"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    subprocess.run([*compiler, "-Wall", "-Werror", "-shared", "-fPIC", SOURCE, "-o", path, "-ldl"], check=True)
    return path


def befallen(library, folder, kind, at, log=""):
    """How a process ended that a fault befell, what it said, and the files that it left."""
    folder.mkdir()
    values = [NUMBERS[kind], at, int(SIGNALS.get(kind, 0)), log]
    done = subprocess.run(
        [sys.executable, "-c", WRITES, *map(str, values)], cwd=folder, env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr, {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.mark.skipif(sys.platform != "linux", reason="faults are preloaded, as Linux can")
def test_a_fault_befalls_the_call_of_its_number(library, tmp_path):
    a, b = "first ", "first second "
    assert befallen(library, tmp_path / "none", "none", 1) == (0, "", {"a": a, "b": b})
    log = tmp_path / "log"
    assert befallen(library, tmp_path / "count", "count", 0, log) == (0, "", {"a": a, "b": b})
    assert log.read_text().splitlines() == CALLS
    for at, left in {1: {}, 2: {".a": ""}, 3: {".a": a}, 6: {".b": a, "a": a}, 7: {".b": b, "a": a}}.items():
        assert befallen(library, tmp_path / f"kill {at}", "kill", at) == (-9, "", left)
    assert befallen(library, tmp_path / "tear", "tear", 2)[::2] == (-9, {".a": "fir"})
    assert befallen(library, tmp_path / "term", "term", 5)[0] == -15
    for kind, number, left in (("full", errno.ENOSPC, {".b": "", "a": a}), ("read-only", errno.EROFS, {".b": "", "a": a})):
        status, said, files = befallen(library, tmp_path / kind, kind, 5)
        assert (status, files) == (1, left)
        assert os.strerror(number) in said


def test_a_difference_is_seen_and_a_date_is_none(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        (folder / "cells").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(range(9)))
        (folder / "report.json").write_text(json.dumps({"created": str(folder), "values": [{"seal": folder.name, "x": 1}]}))
        (folder / "report.md").write_text(f"tuned in {len(folder.name)} s, accuracy 0.5")
    assert differences(content(one), content(other)) == []
    (other / "model.safetensors").write_bytes(bytes(range(8)) + b"\x09")
    (other / "report.json").write_text(json.dumps({"created": "", "values": [{"seal": "", "x": 2}]}))
    (other / "report.md").write_text("tuned in 3 s, accuracy 0.6")
    (other / ".recipe.yaml-new-abcdefgh").touch()
    (other / "cells").rmdir()
    lines = differences(content(one), content(other))
    assert lines == [".recipe.yaml-new-abcdefgh was left over", "cells/ is missing", "model.safetensors differs",
                     "report.json differs", "report.md differs"]  # fmt: skip


def test_what_an_interrupted_call_may_say():
    def wrong(kind, status, said):
        return len(complaints(Fault(kind, 1), Ended(status, said, 0.0)))

    assert not wrong("kill", -9, "locating")
    assert not wrong("full", 2, "locating\nsurgery: cannot write x: No space left on device\n")
    assert not wrong("term", 143, "surgery: interrupted; to go on: surgery run x --resume\n")
    assert wrong("kill", 1, "")
    assert wrong("full", 2, "")
    assert wrong("full", 2, "surgery: one\nsurgery: two\n")
    assert wrong("read-only", 1, "Traceback (most recent call last):\n  ...\nOSError") == 2
    assert wrong("int", -2, "")


@pytest.mark.parametrize(
    ("said", "swept", "failures"),
    [
        ("out is complete; what was there before stays in .out-new-abcdefgh", True, []),
        ("", True, [".out-new-abcdefgh stays, and nothing says so"]),
        ("out is complete; what was there before stays in .out-new-abcdefgh", False, [".out-new-abcdefgh/file was left over"]),
    ],
)
def test_what_a_read_only_disk_keeps_has_to_be_named_and_to_go(tmp_path, monkeypatch, said, swept, failures):
    """The call was done when its disk became read-only: the new folder stands, the old one could not be removed."""
    (tmp_path / "inputs" / "old").mkdir(parents=True)
    (tmp_path / "inputs" / "old" / "file").write_text("old")
    folder, calls = tmp_path / "trial", []

    def surgery(arguments, where, fault=None):
        calls.append(arguments)
        if fault is not None:
            (where / "out").rename(where / ".out-new-abcdefgh")
            (where / "out").mkdir()
            (where / "out" / "file").write_text("new")
        elif swept:
            shutil.rmtree(where / ".out-new-abcdefgh")
        return Ended(0, said, 0.0)

    monkeypatch.setattr(kills.faults, "surgery", surgery)
    trial = Trial(0, "export", [Fault("read-only", 3)])
    case = Case("export", ["export", "--overwrite"], {"old": "out"}, "out")
    folder.mkdir()
    (folder / "file").write_text("new")
    expected = Reference({"out/file": content(folder)["file"]}, 3, 1.0)
    assert kills.one(trial, case, expected, tmp_path / "inputs", folder)["failures"] == failures
    assert calls == [case.arguments, case.goes_on]
