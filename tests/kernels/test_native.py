"""Compiling on first use: what is kept, what goes wrong, and threads."""

import errno
import os
import platform
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch

from surgery.kernels import native
from surgery.kernels.dispatch import KernelError
from surgery.kernels.divergence import KL_DIVERGENCE
from surgery.kernels.selective import SELECTIVE_SCAN, selective_scan
from tests.kernels.builds import forget
from tests.kernels.inputs import make_selective as make_scan
from tests.kernels.test_scans import assert_all_near, truth


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and nothing known of earlier attempts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "surgery"
    monkeypatch.undo()
    forget()


@pytest.fixture
def compiler():
    if reason := SELECTIVE_SCAN.why_not(SELECTIVE_SCAN.backends["native"], *make_scan(1)):
        pytest.skip(reason)


def test_the_library_is_kept(compiler, fresh, monkeypatch):
    native.load("selective")
    (library,) = fresh.iterdir()  # and nothing temporary beside it
    made = library.stat().st_mtime_ns
    native.load.cache_clear()
    native.load("selective")
    assert [file.stat().st_mtime_ns for file in fresh.iterdir()] == [made]
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, "-DOTHER"])
    native.load.cache_clear()
    native.load("selective")
    assert len(list(fresh.iterdir())) == 2


def test_several_build_at_the_same_time(compiler, fresh):
    with ThreadPoolExecutor(3) as pool:
        libraries = list(pool.map(native.load.__wrapped__, ["selective"] * 3))
    assert all(library.scan_forward for library in libraries)
    assert len(list(fresh.iterdir())) == 1


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CC", "/bin/false", "the C compiler '/bin/false' fails: exit status 1"),
        ("CC", "/no/such/cc -m64", r"no C compiler: .*'/no/such/cc'"),
    ],
)
def test_chunked_serves_where_nothing_can_be_built(compiler, fresh, monkeypatch, variable, value, reason):
    monkeypatch.setenv(variable, value)
    scan = make_scan(9)
    assert SELECTIVE_SCAN.choose(*scan).name == "chunked"
    assert_all_near(selective_scan(*scan), truth("selective", scan))
    with pytest.raises(KernelError, match=f"'native' was asked for and cannot serve: RuntimeError: {reason}"):
        selective_scan(*scan, backend="native")


@pytest.mark.parametrize("cache", ["file", "read-only", "full", "not executable"])
def test_without_a_cache_folder_every_process_makes_its_own(compiler, fresh, monkeypatch, cache):
    if cache == "file":
        monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    elif cache == "read-only":
        monkeypatch.setattr(Path, "mkdir", fails(errno.EROFS))
    elif cache == "full":
        monkeypatch.setattr(native.os, "replace", fails(errno.ENOSPC))
    else:
        load = native.ctypes.CDLL

        def elsewhere(path):
            if str(fresh) in path:
                raise OSError("failed to map segment from shared object: Operation not permitted")
            return load(path)

        monkeypatch.setattr(native.ctypes, "CDLL", elsewhere)
    student, teacher = torch.zeros(1, 3), torch.ones(1, 3)
    assert KL_DIVERGENCE.choose(student, teacher).name == "native"
    assert KL_DIVERGENCE(student, teacher)[0] == 0
    assert not list(fresh.glob("*"))


def fails(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_read_only_cache_folder_that_holds_the_library_is_used(compiler, fresh, monkeypatch):
    native.load("divergence")
    native.load.cache_clear()
    monkeypatch.setattr(Path, "mkdir", fails(errno.EROFS))
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("it is made again"))
    assert native.load("divergence").diverge


def test_a_broken_library_is_made_again(compiler, fresh):
    native.load("divergence")
    (library,) = fresh.iterdir()
    whole = library.read_bytes()
    library.unlink()  # it is open; another file takes its place
    library.write_bytes(whole[:100])
    native.load.cache_clear()
    assert native.load("divergence").diverge
    assert library.read_bytes() == whole


def test_machines_that_share_a_home_folder_share_no_library_that_one_of_them_cannot_run(compiler, fresh, monkeypatch):
    native.load("divergence")
    changes = [
        lambda patch: patch.setenv("CC", "cc -O1"),
        lambda patch: patch.setattr(native.platform, "libc_ver", lambda: ("glibc", "2.17")),
    ]
    if platform.machine() == "x86_64":  # what -march=native is on another processor
        changes.append(lambda patch: patch.setattr(native, "TARGETS", ("-mno-avx",)))
    for number, change in enumerate(changes):
        with monkeypatch.context() as patch:
            change(patch)
            native.load.cache_clear()
            native.load("divergence")
        assert len(list(fresh.iterdir())) == 2 + number


COMPILER = """#!/bin/sh
if [ -e {marker} ]; then exec cc "$@"; fi
case "$*" in *-dM*) exec cc "$@";; esac
touch {marker}
{failure}
"""


@pytest.mark.parametrize(
    "failure",
    [
        "echo 'gcc: fatal error: Killed signal terminated program cc1' >&2; exit 1",
        "echo 'as: error writing to /tmp/cc.o: No space left on device' >&2; exit 1",
    ],
)
def test_a_compiler_that_was_killed_is_called_again(compiler, fresh, tmp_path, monkeypatch, failure):
    """Here at once, for the folder of the process; else later."""
    script = tmp_path / "unlucky"
    script.write_text(COMPILER.format(marker=tmp_path / "marker", failure=failure))
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))
    assert native.load("divergence").diverge
    (tmp_path / "marker").unlink()
    native.load.cache_clear()
    monkeypatch.setattr(native, "_kept", fails(errno.EROFS))
    with pytest.raises(native.PassingError, match="fails: "):
        native.load("divergence")
    assert native.load("divergence").diverge


def test_a_compiler_that_was_killed_while_it_named_the_processor_makes_no_library(compiler, fresh, tmp_path, monkeypatch):
    script = tmp_path / "unlucky"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(native.PassingError, match="fails: exit status -9"):
        native.load("divergence")


def test_what_killed_builds_have_left_is_removed(compiler, fresh):
    old, new = fresh / f"{native.BUILDING}old", fresh / f"{native.BUILDING}new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / f"ssd-{20 * '0'}.so").touch()
    os.utime(old, (0, 0))
    native.load("divergence")
    assert sorted(path.name.split("-")[0] for path in fresh.iterdir()) == ["building", "divergence"]
    assert new.exists()


def test_what_is_not_a_library_of_ours_stays(compiler, fresh):
    mine = fresh / f"{native.BUILDING}mine" / "thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    os.utime(mine.parent, (0, 0))
    native.load("divergence")
    assert mine.read_text() == "years of work"


@pytest.mark.slow
def test_several_processes_build_at_the_same_time(compiler, fresh):
    program = "from surgery.kernels.native import load; assert load('ssd').scan_forward; print('loaded')"
    processes = [Popen([sys.executable, "-c", program], stdout=PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["loaded\n"] * 3
    assert len(list(fresh.iterdir())) == 1


def test_without_an_openmp_to_share_the_result_is_the_same(compiler, monkeypatch):
    scan, before = make_scan(131, channels=300), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shared = selective_scan(*scan, backend="native")
        monkeypatch.setattr(native, "_team", lambda process: None)
        own = selective_scan(*scan, backend="native")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(m, n) for m, n in zip(shared, own, strict=True))


def test_a_forked_process_has_threads_of_its_own(compiler):
    """Those of the pool do not survive a fork; waiting for them would never end."""
    scan, before = make_scan(5, channels=300), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        y, _ = selective_scan(*scan, backend="native")
        if not (child := os.fork()):
            same = torch.equal(y, selective_scan(*scan, backend="native")[0])
            os._exit(0 if same else 1)
    finally:
        torch.set_num_threads(before)
    for _ in range(3000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked process hangs")
    assert os.waitstatus_to_exitcode(status) == 0
