"""make gpu without a GPU: it says so in one line; with stand-ins for the machine and the parts, what it does within its time,
what it writes, and where it goes on."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools import gpu
from tools.gpu import Part, conduct

ROOT = Path(__file__).parents[1]
HERE = {"device": "A GPU", "versions": {"torch": "2"}, "code": "a"}


def part(name, code, read=lambda output: output.strip()):
    return Part(name, (sys.executable, "-c", code), read)


def outcomes(out):
    return {name: entry["outcome"] for name, entry in json.loads(out.read_text())["parts"].items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_one_line_and_nothing_written(monkeypatch, capsys, tmp_path):
    out = tmp_path / "gpu.json"
    assert gpu.main(["--out", str(out), "--work", str(tmp_path / "work")]) == 1
    assert capsys.readouterr().err == "gpu: no GPU that torch can use is here; nothing was done\n"
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "there_is_none"))
    assert gpu.main(["--out", str(out), "--work", str(tmp_path / "work")]) == 1
    assert capsys.readouterr().err.startswith("gpu: there_is_none: not installed for python")
    assert not list(tmp_path.iterdir())


def test_make_gpu_installs_nothing(tmp_path):
    """Whatever Python is here: the target only calls it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
    python.chmod(0o755)
    variables = [f"PYTHON={python}", f"BIN={tmp_path}/nowhere"]
    subprocess.run(["make", "-s", "gpu", *variables], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "called").read_text() == "-m tools.gpu\n"


def test_what_failed_is_done_again_and_what_passed_is_not(tmp_path):
    out, count, mended = tmp_path / "gpu.json", tmp_path / "count", tmp_path / "mended"
    counting = f"import os, sys; open({str(count)!r}, 'a').write('x')"
    todo = [
        part("first", f"{counting}; import time; time.sleep(0.1); print('12 passed')"),
        part("second", f"{counting}; print('bad'); sys.exit(3 * (not os.path.exists({str(mended)!r})))"),
        part("odd", f"import os; print(1 if os.path.exists({str(mended)!r}) else 'no number')", read=int),
    ]
    assert conduct(todo, HERE, out, tmp_path / "log", 60) == 1
    record = json.loads(out.read_text())
    assert record["machine"] == HERE
    assert record["date"].endswith("+00:00")
    assert outcomes(out) == {"first": "passed", "second": "failed", "odd": "failed"}
    assert [record["parts"][name]["result"] for name in ("first", "second")] == ["12 passed", "bad"]
    assert "ValueError" in record["parts"]["odd"]["result"]
    assert record["parts"]["first"]["seconds"] >= 0.1
    mended.touch()
    for _ in range(2):
        assert conduct(todo, HERE, out, tmp_path / "log", 60) == 0
        assert count.read_text() == "xxx"
    assert conduct(todo, HERE | {"code": "b"}, out, tmp_path / "log", 60) == 0  # other code: everything anew
    assert count.read_text() == "xxxxx"


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """The file with which a part says that it works. Then, and no sooner, its time is over: a busy machine may take long to
    start a process."""
    path = tmp_path / "ready"

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None or path.exists():
                return super().wait(timeout)
            while self.poll() is None and not path.exists():
                time.sleep(0.01)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout)
            return self.returncode

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: 1000.0 * path.exists()))
    return path


def test_time_ends_a_part_and_the_next_call_goes_on(tmp_path, capfd, ready):
    """It is interrupted, and may write what it has; one that does not end then is ended; a later part is not begun."""
    out, half = tmp_path / "gpu.json", tmp_path / "half"
    code = f"""
import os, time
if os.path.exists({str(half)!r}):
    raise SystemExit(0)
try:
    open({str(ready)!r}, "w").close()
    time.sleep(600)
except KeyboardInterrupt:
    open({str(half)!r}, "w").write("half")
    raise SystemExit(130)
"""
    todo = [part("long", code), part("next", "print(2)")]
    assert conduct(todo, HERE, out, tmp_path / "log", 60) == 2
    assert half.read_text() == "half"
    assert outcomes(out)["long"] == "out of time"
    assert "the same command goes on there" in capfd.readouterr().out
    assert conduct(todo, HERE, out, tmp_path / "log", 60) == 0
    assert outcomes(out) == {"long": "passed", "next": "passed"}


def test_a_part_that_does_not_listen_is_killed_with_its_children(tmp_path, monkeypatch, ready):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)
open({str(ready)!r}, "w").close()
time.sleep(600)
"""
    out = tmp_path / "gpu.json"
    assert conduct([part("deaf", code, read=int)], HERE, out, tmp_path / "log", 60) == 2
    child = json.loads(out.read_text())["parts"]["deaf"]["result"]
    state, end = Path(f"/proc/{child}/stat"), time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z":  # it was killed, and takes a moment to die
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_the_parts_say_is_read(tmp_path):
    assert gpu.summary("..s\n=== 7 passed, 2 skipped in 3.4s ===\n") == "7 passed, 2 skipped"
    report = json.loads((ROOT / "recipes" / "demo-mamba2.report.json").read_text())
    read = gpu.figures({"memory": {"locate": 3}, **report})
    assert read["models"]["tuned"]["kv"]["64"] == report["models"]["tuned"]["kv"]["64"]["accuracy"]
    assert 0 < read["models"]["base"]["knowledge"] < 1 < read["models"]["base"]["perplexity"]
    for job in gpu.parts(tmp_path):
        assert find_spec(job.command[2]), job.name


def test_memory_is_measured(tmp_path):
    """Its own part of the record, on a CPU, which runs as on a GPU."""
    from tools.gpu_memory import measured

    rows = measured("tiny-mamba2", (24,), torch.device("cpu"), 0.0)
    assert [(row["model"], row["pass"]) for row in rows] == [("base", "forward"), ("hybrid", "forward"), ("hybrid", "backward")]
    assert all(row["peak_bytes"] > 0 < row["milliseconds"] for row in rows)
    assert rows[1]["weights"] > rows[0]["weights"]
