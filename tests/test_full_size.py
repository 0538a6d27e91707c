"""The script that measures the job at full size: what it counts, and that it goes on where it was stopped."""

import sys
from types import SimpleNamespace

import pytest

from surgery.errors import UserError
from tools import full_size, peak_memory
from tools.costs_page import recipes, stages
from tools.full_size import Job, Size
from tools.full_size_record import FullSize
from tools.published import published

MIB = 2**20
# A process that maps a file, as weights are, holds 60 MiB of its own, and starts another one that maps the same file, and ends
# once both have been looked at.
PROGRAM = """
import mmap, os, subprocess, sys, time
opened = open(sys.argv[1])
weights = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
seen = sum(weights[i] for i in range(0, len(weights), 4096))
own = b"x" * (60 * 2**20) if len(sys.argv) > 2 else b""
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]]) if len(sys.argv) > 2 else None
if child is None:
    open("ready", "w").close()
    while not os.path.exists("seen"):
        time.sleep(0.02)
    print("done", flush=True)
else:
    child.wait()
sys.exit(3 if child is not None else 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
def test_pages_that_processes_share_count_once(tmp_path, monkeypatch):
    looks = []

    def look(*arguments):
        """From one look after both are there on."""
        looks.append((tmp_path / "ready").exists())
        if sum(looks) > 1:
            (tmp_path / "seen").touch()
        return family(*arguments)

    family = peak_memory._family
    monkeypatch.setattr(peak_memory, "_family", look)
    (tmp_path / "weights").write_bytes(b"1" * (200 * MIB))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "weights"), PROGRAM]
    outcome = peak_memory.measure(command, tmp_path / "log", folder=tmp_path)
    assert outcome.status == 3
    assert outcome.output == "done\n"
    assert 260 * MIB < outcome.peak < 340 * MIB  # mapped twice it would be 460
    assert 60 * MIB < outcome.anonymous < 140 * MIB
    assert 195 * MIB < outcome.files < 240 * MIB
    assert 0 < outcome.cpu_seconds < outcome.seconds * 4


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose stages only make their folders. calls: their names; failing: those that do not end well."""
    calls, failing = [], set()

    def measure(command, log, settings, folder):
        stage = log.stem
        calls.append(stage)
        log.write_text("it broke\n" if stage in failing else "fine\n")
        made = made_by[stage]
        if made and stage not in failing:
            (folder / made).mkdir(parents=True)
            (folder / made / "model.safetensors").write_bytes(bytes(100))
        (folder / "model").mkdir(exist_ok=True)
        return peak_memory.Outcome(int(stage in failing), 1.0, 2.0, 5 * full_size.GIB, 1, 2, log.read_text())

    monkeypatch.setattr(full_size, "measure", measure)
    monkeypatch.setattr(full_size, "device", lambda: "cpu")
    made = Job(published("falcon-mamba-7b"), tmp_path, tmp_path / "record.json", Size(), None, "bfloat16")
    made_by = {stage: step.makes for stage, step in made.steps.items()}
    return SimpleNamespace(job=made, calls=calls, failing=failing, record=tmp_path / "record.json")


ALL = ["write", "load", "locate", "plan", "splice", "tune", "export-patch", "export-hf", "bench"]


def test_every_stage_once_and_what_is_gone_again(job, capsys):
    assert job.job.do(ALL)
    assert job.calls == ALL
    assert not (job.job.folder / "spliced").exists()
    assert job.job.do(ALL)
    assert job.calls == ALL
    assert capsys.readouterr().out.count("(on record)") == len(ALL)
    assert job.job.do(["tune"], again=True)
    assert job.calls == [*ALL, "splice", "tune"]
    assert [stage.stage for stage in FullSize.read(job.record).stages] == ALL


def test_what_was_interrupted_is_not_taken_for_made(job):
    assert job.job.do(["write"])
    (job.job.folder / "write.begun").touch()
    assert job.job.do(["load"])
    assert job.calls == ["write", "write", "load"]


def test_a_failure_is_on_record_and_measured_again(job):
    job.failing.add("locate")
    with pytest.raises(UserError, match=r"locate failed, see .*: exit status 1: it broke"):
        job.job.do(ALL)
    assert [stage.passed for stage in FullSize.read(job.record).stages] == [True, True, False]
    job.failing.clear()
    assert job.job.do(ALL)
    assert job.calls == ["write", "load", "locate", *ALL[2:]]


def test_beyond_the_limit_is_not_passed(job, monkeypatch):
    monkeypatch.setattr(full_size, "LIMIT", full_size.GIB)
    assert not job.job.do(["load"])
    (_, load) = FullSize.read(job.record).stages
    assert load.failure is None
    assert "beyond its limit" in load.line()


def test_the_record_names_no_place_on_this_machine(job, tmp_path):
    with pytest.raises(UserError, match="there is no stage publish for falcon-mamba-7b"):
        job.job.do(["publish"])
    job.job.do([*ALL, "run"])
    assert str(tmp_path) not in job.record.read_text()
    assert str(full_size.ROOT) not in job.record.read_text()


def test_the_page_marks_where_a_figure_is_from(job, tmp_path):
    job.job.do(["load"])
    (log := tmp_path / "log").write_text(
        'opening ...\n{\n  "stages": [{"seconds": 90, "memory": 3221225472, "disk": 5}]\n}\nend\n'
    )
    record = FullSize.read(job.record)
    foretold = record.stages[-1].model_copy(update={"stage": "estimate", "foretold": full_size.foretold(log)})
    rows = {}
    for name, known in (("nothing", FullSize()), ("estimate", record.with_stage(foretold))):
        rows[name] = next(line for line in recipes(known).splitlines() if "`falcon-mamba-7b`" in line)
    assert rows["nothing"].endswith("| 14.5 GB | 29.1 GB | not measured |")
    assert "laptop: " in rows["estimate"]
    assert "3.0 GiB (extrapolated)" in rows["estimate"]
    measured = record.with_stage(record.stages[-1].model_copy(update={"stage": "recipe"}))
    assert "5.0 GiB (measured)" in recipes(measured)
    assert "| falcon-mamba-7b | load |" in stages(record)
    cut = FullSize(stages=tuple(stage.model_copy(update={"layers": 2}) for stage in record.stages))
    assert "Nothing has been measured" in stages(cut)


def test_a_cut_model_has_a_folder_of_its_own(tmp_path):
    folders = {
        Job(published("mamba2-2.7b"), tmp_path, tmp_path / "record.json", size, None, "bfloat16").folder.name
        for size in (Size(), Size(2), Size(2, 8192), Size(2, 8192, True))
    }
    assert len(folders) == 4
    assert "mamba2-2.7b" in folders
