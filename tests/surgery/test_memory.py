"""The peak of what is held, and what the machine has for it."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from surgery.runtime import memory, whole_memory

MIB = 2**20


def hold(mebibytes: int, peak: memory.Peak | None = None) -> None:
    """peak: where a thread has to look, until it has."""
    seen, end = memory.resident() + mebibytes * MIB // 2, time.monotonic() + 300
    tensor = torch.ones(mebibytes * MIB // 4)
    while peak is not None and peak.process < seen and time.monotonic() < end:
        time.sleep(memory.EVERY)
    del tensor


@pytest.mark.parametrize("kept_by_the_system", [True, False])
def test_a_stage_has_the_peak_of_its_own_work(kept_by_the_system, tmp_path, monkeypatch):
    if not kept_by_the_system:
        monkeypatch.setattr(memory, "RESET", tmp_path / "none")
    elif not memory._resettable():
        pytest.skip("this system keeps no peak that can be reset")
    before = memory.resident()
    with memory.measured() as whole:
        with memory.measured() as first:
            hold(480, None if kept_by_the_system else first)
        with memory.measured() as second:
            hold(32)
    # A system that is short of memory may drop pages of this process's libraries meanwhile, and read others.
    assert before + 240 * MIB < first.process < before + 720 * MIB
    assert second.process < first.process - 240 * MIB
    assert whole.process >= first.process
    assert (first.children, first.device) == (0, 0)


def test_children_are_counted():
    """A child that has held 150 MiB, and lives until it was looked at."""
    held = 150 if sys.platform == "linux" else 5
    program = f"x = bytearray(150 * {MIB}); x = None; input()"
    with (
        memory.measured() as peak,
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True) as child,
    ):
        end = time.monotonic() + 60
        while peak.children < held * MIB and time.monotonic() < end:
            time.sleep(0.05)
        child.communicate("\n")
    assert held * MIB < peak.children < 250 * MIB
    # Linux counts resident pages to within a few megabytes.
    assert peak.children + memory.resident() / 2 < peak.total <= peak.process + peak.children + 32 * MIB


def test_work_that_fails_is_measured_too():
    with pytest.raises(ValueError, match="work"), memory.measured() as peak:
        raise ValueError("work")
    assert peak.process > 0
    assert memory._open == []


@pytest.mark.parametrize(("version", "group"), [(2, "jobs/mine"), (1, "jobs/mine"), (2, ""), (1, "elsewhere/mine")])
def test_the_limit_of_a_control_group_is_obeyed(version, group, tmp_path, monkeypatch):
    """Its own, or that of a group above it."""
    monkeypatch.setattr(whole_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(whole_memory, "OWN_GROUPS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text(f"0::/{group}\n" if version == 2 else f"5:cpu:/\n4:memory:/{group}\n0::/\n")
    folder = (tmp_path if version == 2 else tmp_path / "memory") / ("jobs" if group.startswith("jobs") else "")
    folder.mkdir(parents=True, exist_ok=True)
    names = ("max", "current", "inactive_file") if version == 2 else ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    (folder / f"memory.{names[0]}").write_text(f"{300 * MIB}\n")
    (folder / f"memory.{names[1]}").write_text(f"{200 * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {50 * MIB}\n")
    assert memory.available() == 150 * MIB
    assert memory.capacity() == 300 * MIB
    (folder / f"memory.{names[0]}").write_text("max\n" if version == 2 else "9223372036854771712\n")
    assert memory.capacity() > 300 * MIB, "what the machine has, by whichever of the kernel's figures"
    assert 0 < memory.available() <= memory.capacity()


def test_processes_on_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda _: 100)
    assert memory.spare() == 100
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.spare() == 25
    assert memory.spare("cuda:1") == 100  # each has a GPU of its own


def test_free_disk_of_a_folder_that_is_yet_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=str(folder)))
    assert memory.free_disk(tmp_path / "new" / "folder") == memory.free_disk(tmp_path) == str(tmp_path)


@pytest.mark.parametrize(("size", "place", "done"), [(2, "cpu", True), (1, "cpu", False), (2, "cuda", False)])
def test_large_allocations_have_pages_of_their_own_beside_a_big_model(size, place, done, monkeypatch):
    """Where glibc can be told so; nothing changes for a small model, or one on a GPU."""
    told = []
    library = SimpleNamespace(mallopt=lambda *setting: told.append(setting) or 1)
    monkeypatch.setattr(memory, "BIG", 2)
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(memory.processes, "of_the_command_line", True)
    model = SimpleNamespace(device=torch.device(place), parameters=lambda: [torch.zeros(size, dtype=torch.int8)])
    assert memory.keep_apart(model) is done
    assert told == ([(-3, 2**20)] if done else [])
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace())  # as musl has neither
    assert not memory.keep_apart(model)
    memory.trim()


def test_a_program_of_the_users_keeps_its_allocator(monkeypatch):
    """What is set for a process cannot be taken back: in Python nothing is set."""
    monkeypatch.setattr(memory, "BIG", 0)
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: pytest.fail("the process is changed"))
    model = SimpleNamespace(device=torch.device("cpu"), parameters=lambda: [torch.zeros(1)])
    assert not memory.keep_apart(model)
