"""What is written under a hidden name first: whole or not at all, and nothing left over for long."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from surgery.errors import UserError
from surgery.jobs.output_folder import begin, check_folder, is_empty
from surgery.records.recipe import Recipe
from surgery.records.record import write_text
from surgery.runtime import replacing
from surgery.runtime.plotting import drawing
from surgery.runtime.replacing import building, remove, replace, sweep, written


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def held(path):
    """A descriptor with the lock of a writer that lives."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_what_a_killed_writer_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path):
    left, now, other = (tmp_path / name for name in (".a.json-new-abcdefgh", ".a.json-new-12345678", ".b.json-new-abcdefgh"))
    for path in (left, now, other):
        path.touch()
    writer = held(now)
    write_text(tmp_path / "a.json", "{}")
    assert names(tmp_path) == [now.name, other.name, "a.json"]
    sweep(tmp_path)
    assert names(tmp_path) == [now.name, "a.json"]
    os.close(writer)
    sweep(tmp_path)
    assert names(tmp_path) == ["a.json"]


def test_a_sweep_takes_nothing_that_no_writer_of_ours_named(tmp_path):
    mine = (".bashrc", ".x-old", ".a-new-", ".a-new-toolong12", "a-new-abcdefgh", ".a-new-ABCDEFGH", ".git/x", ".env-newer")
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = names(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / ".tuned.csv-new-abcdefgh").touch()
    (tmp_path / "below" / ".checkpoint-4-new-abcdefgh").mkdir()
    (tmp_path / "below" / ".checkpoint-4-new-abcdefgh" / "state.json").touch()
    sweep(tmp_path)
    assert names(tmp_path) == sorted([*before, "below"])
    replacing.recover(tmp_path / "x")
    write_text(tmp_path / "x", "text")
    assert names(tmp_path) == sorted([*before, "below", "x"])


def test_a_writer_whose_file_was_taken_for_abandoned_makes_another(tmp_path, monkeypatch):
    """Between the making of a file and its lock, another process may find it without."""
    make, taken = replacing._new_file, []

    def made(path):
        place = make(path)
        if not taken:
            taken.append(place)
            sweep(path.parent)
        return place

    monkeypatch.setattr(replacing, "_new_file", made)
    write_text(tmp_path / "x", "text")
    assert taken
    assert names(tmp_path) == ["x"]


def test_a_file_system_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    left = tmp_path / ".x-new-abcdefgh"
    left.touch()
    write_text(tmp_path / "x", "text")
    assert names(tmp_path) == [left.name, "x"]  # it might still be written
    with building(tmp_path / "folder") as place:
        (place / "file").touch()
        replace(place, tmp_path / "folder")
    assert names(tmp_path) == [left.name, "folder", "folder/file", "x"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_figure_on_a_full_disk_is_one_line(tmp_path, monkeypatch, number):
    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with (
        pytest.raises(UserError, match=f"^cannot write .*figure.png: {os.strerror(number)}$"),
        drawing(tmp_path / "figure.png", height=1),
    ):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("way", [written, building])
def test_an_interrupted_writer_leaves_nothing(tmp_path, way):
    def interrupted():
        with way(tmp_path / "x") as place:
            (place / "half" if way is building else place).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


def filled(path, text):
    path.mkdir()
    (path / "file").write_text(text)


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_cannot_be_removed_any_more_is_named_and_goes_with_the_next_writer(tmp_path, monkeypatch, capsys, exchanges):
    """A disk that turns read-only after the new folder stands."""

    def exchange(first, second):
        aside = tmp_path / "aside"
        for source, target in ((first, aside), (second, first), (aside, second)):
            os.rename(source, target)
        return True

    monkeypatch.setattr(replacing, "_exchange", exchange if exchanges else lambda *_: False)
    target = tmp_path / "out"
    filled(target, "old")

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as disk:
        for name in ("unlink", "rmdir"):
            disk.setattr(os, name, read_only)
        with building(target) as place:
            (place / "file").write_text("new")
            replace(place, target)
    (left,) = [path for path in tmp_path.iterdir() if path != target]
    assert ((target / "file").read_text(), (left / "file").read_text()) == ("new", "old")
    said = " ".join(capsys.readouterr().err.split())
    assert f"stays in {left} until the next call ({os.strerror(errno.EROFS)})" in said
    with building(target) as place:
        (place / "file").write_text("newer")
        replace(place, target)
    assert names(tmp_path) == ["out", "out/file"]
    assert capsys.readouterr().err == ""


def test_a_folder_is_never_seen_in_part_while_it_is_removed(tmp_path, monkeypatch):
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "hybrid" / "config.json").touch()
    seen = []
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: seen.append(names(tmp_path)))
    remove(tmp_path / "hybrid")
    assert not (tmp_path / "hybrid").exists()
    assert replacing.is_hidden(tmp_path / seen[0][0])
    monkeypatch.undo()
    sweep(tmp_path)
    assert names(tmp_path) == []


def test_a_folder_in_which_a_run_was_killed_at_once_is_empty(tmp_path):
    (tmp_path / ".run.json-new-abcdefgh").touch()
    assert is_empty(tmp_path)
    check_folder(tmp_path, "run", resume=True)
    begin(tmp_path, "run", Recipe(model="base"), resume=True)
    assert names(tmp_path) == ["recipe.yaml", "run.json"]


def test_killed_while_an_earlier_run_is_removed_it_is_still_a_run(tmp_path, monkeypatch):
    """Whatever is gone already, --overwrite and --resume go on."""
    place = tmp_path / "out"
    for after in range(6):
        begin(place, "run", Recipe(model="base"), overwrite=True)
        for name in ("ranking.json", "plan.json", "hybrid/config.json", "hybrid/plan.json", "cells/a.json"):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).touch()
        steps = iter(range(after))

        def dies(path, steps=steps):
            if next(steps, None) is None:
                raise KeyboardInterrupt
            remove(path)

        monkeypatch.setattr("surgery.jobs.output_folder.remove", dies)
        try:
            begin(place, "run", Recipe(model="base"), overwrite=True)
        except KeyboardInterrupt:
            check_folder(place, "run", overwrite=True)
            if not is_empty(place):
                check_folder(place, "run", resume=True)
        monkeypatch.undo()


PRINTS = """
import errno, os, sys
from surgery.cli import app

def full():
    raise OSError(errno.{name}, os.strerror(errno.{name}), "x/file")

app.app = full
sys.argv = ["surgery", "run", "r"]
app.main()
"""


@pytest.mark.parametrize(("name", "status"), [("ENOSPC", 2), ("EROFS", 2), ("ENOENT", 1)])
def test_what_a_library_cannot_write_is_one_line_too(name, status):
    """And an error of another kind, which is a mistake of ours, keeps its traceback."""
    done = subprocess.run([sys.executable, "-c", PRINTS.format(name=name)], capture_output=True, text=True, check=False)
    assert done.returncode == status
    line = f"surgery: cannot write x/file: {os.strerror(getattr(errno, name))}\n"
    assert (done.stderr == line) is (status == 2)
    assert done.returncode != -signal.SIGKILL
