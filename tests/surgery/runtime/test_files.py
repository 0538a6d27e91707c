"""Output folders: nothing that is not ours is replaced or removed, and a reader sees the old content or the new one."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.errors import UserError
from surgery.runtime.files import LOCK, MANIFEST, check_output_file, file_digest, open_output, read_text, write_text


def contents(folder: Path) -> dict[str, bytes]:
    """What a folder holds, but what this toolkit notes about it."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, LOCK)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def fill(folder: Path) -> None:
    with open_output(folder) as output:
        output.write("a.json", "{}", {"x": 1})
        with output.new_folder("hybrid") as new:
            (new / "w").write_text("1")
            (new / "sub").mkdir()
            (new / "sub" / "z").write_text("2")
        with output.folder("tuning/one", {"steps": 1}) as long:
            (long / "c").write_text("3")


@pytest.fixture
def ran(tmp_path):
    fill(tmp_path / "out")
    return tmp_path / "out"


def test_what_was_made_with_the_same_settings_is_known(ran):
    with open_output(ran, resume=True) as output:
        assert output.is_made("a.json", {"x": 1})
        assert not output.is_made("a.json", {"x": 2})
        (ran / "a.json").write_text("{} ")
        assert not output.is_made("a.json", {"x": 1})


def test_an_earlier_run_is_neither_continued_nor_replaced_unasked(ran):
    before = contents(ran)
    with pytest.raises(UserError, match="--resume goes on"):
        open_output(ran, resume=False)
    with pytest.raises(UserError, match="run: --overwrite"):  # a command that cannot go on
        open_output(ran)
    assert contents(ran) == before


def test_clear_removes_ours_and_nothing_else(ran):
    (ran / "hybrid" / "mine.txt").write_text("mine")
    (ran / "notes.txt").write_text("mine")
    with open_output(ran, overwrite=True) as output:
        output.clear()
    assert set(contents(ran)) == {"hybrid/mine.txt", "notes.txt"}


def test_a_file_of_ours_that_was_changed_ends_the_command_before_anything_is_removed(ran):
    (ran / "hybrid" / "w").write_text("changed")
    before = contents(ran)
    with pytest.raises(UserError, match="w"):
        open_output(ran, overwrite=True)
    assert contents(ran) == before


@pytest.mark.parametrize("name", ["a.json", "hybrid/w"])
def test_a_file_of_ours_that_was_edited_is_not_replaced(ran, name):
    (ran / name).write_text("edited")
    with pytest.raises(UserError, match="was changed"):
        open_output(ran, resume=True)
    with pytest.raises(UserError, match="give one"):
        open_output(ran, resume=True, overwrite=True)


def test_only_the_main_process_clears(ran, monkeypatch):
    before = contents(ran)
    monkeypatch.setattr("surgery.runtime.files.is_main", lambda: False)
    with open_output(ran, overwrite=True) as output:
        output.clear()
    assert contents(ran) == before
    assert "a.json" in (ran / MANIFEST).read_text()


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match=r"notes\.txt"):
            open_output(tmp_path, **options)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_manifest_that_came_with_a_copy_gives_no_rights(ran, tmp_path):
    shutil.copytree(ran, tmp_path / "copy")
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match="copy"):
            open_output(tmp_path / "copy", **options)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"folder": 1}', "x", "[" * 100_000])
def test_a_damaged_manifest_gives_no_rights(ran, text):
    (ran / MANIFEST).write_text(text)
    with pytest.raises(UserError):
        open_output(ran, overwrite=True)


def test_a_manifest_cannot_name_a_file_outside(ran, tmp_path):
    (tmp_path / "victim").write_text("mine")
    held = json.loads((ran / MANIFEST).read_text())
    held["files"]["../victim"] = held["files"]["a.json"]
    (ran / MANIFEST).write_text(json.dumps(held))
    with pytest.raises(UserError):
        open_output(ran, overwrite=True)
    assert (tmp_path / "victim").exists()


@pytest.mark.parametrize("way", ["itself", "holds", "link", "relative"])
def test_an_output_that_is_or_holds_an_input_is_refused(ran, tmp_path, way, monkeypatch):
    given = ran / "hybrid"
    out = {"itself": given, "holds": ran, "link": tmp_path / "link", "relative": Path("out/hybrid/..")}[way]
    if way == "link":
        out.symlink_to(ran)
    monkeypatch.chdir(tmp_path)
    before = contents(ran)
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match="reads"):
            open_output(out, [given], **options)
    assert contents(ran) == before


def test_a_failure_leaves_the_folder_as_it_was(ran):
    before = contents(ran)

    def fail(output):
        with output.new_folder("hybrid") as new:
            (new / "w").write_text("new")
            raise RuntimeError

    with open_output(ran, overwrite=True) as output, pytest.raises(RuntimeError):
        fail(output)
    assert contents(ran) == before


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_before_anything_is_written_leaves_nothing(tmp_path, there):
    folder = tmp_path / "out"
    if there:
        folder.mkdir()

    def fail():
        with open_output(folder if there else folder / "of" / "runs") as output, output.new_folder("."):
            raise UserError("no")

    with pytest.raises(UserError):
        fail()
    assert list(tmp_path.rglob("*")) == ([folder] if there else [])


def test_a_new_folder_replaces_ours_whole(ran):
    (ran / "hybrid" / "mine.txt").write_text("mine")
    with open_output(ran, overwrite=True) as output, output.new_folder("hybrid") as new:
        (new / "w").write_text("new")
    assert {name for name in contents(ran) if name.startswith("hybrid")} == {"hybrid/w", "hybrid/mine.txt"}
    assert (ran / "hybrid" / "w").read_text() == "new"


def test_new_files_may_be_read_by_whom_the_umask_says(ran):
    with open_output(ran, overwrite=True) as output, output.new_folder("hybrid") as new:
        (new / "w").touch(mode=0o600)
    assert (ran / "hybrid" / "w").stat().st_mode == (ran / "a.json").stat().st_mode


def test_a_file_of_the_users_in_the_way_is_not_replaced(ran):
    (ran / "b.json").write_text("mine")
    with open_output(ran, resume=True) as output, pytest.raises(UserError, match=r"b\.json"):
        output.write("b.json", "{}")
    assert (ran / "b.json").read_text() == "mine"


def test_a_long_folder_is_kept_with_its_settings_and_begins_empty_with_others(ran):
    with open_output(ran, resume=True) as output:
        with output.folder("tuning/one", {"steps": 1}) as folder:
            assert (folder / "c").exists()
        with output.folder("tuning/one", {"steps": 2}) as folder:
            assert not (folder / "c").exists()


KILLED = """
import os, sys
from pathlib import Path
from surgery.runtime.files import open_output
output = open_output(sys.argv[1], overwrite=True)
with output.folder("tuning/two", 1) as folder:
    (folder / "c").write_text("4")
    if sys.argv[2] == "long":
        os._exit(9)
with output.new_folder("hybrid") as new:
    (new / "w").write_text("new")
    if sys.argv[2] == "filling":
        os._exit(9)
    replace, os.replace = os.replace, lambda a, b: (replace(a, b), os._exit(9)) if str(b).endswith("/w") else replace(a, b)
"""


@pytest.mark.parametrize("moment", ["long", "filling", "moving"])
def test_a_killed_run_can_be_continued_and_replaced(ran, moment):
    subprocess.run([sys.executable, "-c", KILLED, str(ran), moment], check=False, cwd=Path(__file__).parents[3])
    with open_output(ran, resume=True) as output:
        assert (ran / "hybrid" / "w").read_text() == ("new" if moment == "moving" else "1")
        assert (ran / "tuning" / "two" / "c").exists()
        output.clear()
    assert contents(ran) == {}


def test_two_runs_in_one_folder(ran):
    with open_output(ran, resume=True):
        for how in ({"resume": True}, {"overwrite": True}, {}):
            with pytest.raises(UserError, match=str(os.getpid())):
                open_output(ran, **how)
    open_output(ran, resume=True).__exit__(None, None, None)


@pytest.mark.parametrize("way", ["link", "hard link", "folder", "pipe"])
def test_what_has_the_name_of_the_lock_is_left_alone(tmp_path, way):
    mine, out = tmp_path / "mine.txt", tmp_path / "out"
    mine.write_text("mine")
    out.mkdir()
    make = {"link": os.symlink, "hard link": os.link, "folder": lambda _, to: to.mkdir(), "pipe": lambda _, to: os.mkfifo(to)}
    make[way](mine, out / LOCK)
    with pytest.raises(UserError, match="move it away"):
        open_output(out)
    assert mine.read_text() == "mine"


def test_a_file_of_the_users_in_a_long_folder_stays_theirs(ran):
    (ran / "tuning" / "one" / "notes.txt").write_text("mine")
    with (
        suppress(KeyboardInterrupt),
        open_output(ran, resume=True) as output,
        output.folder("tuning/one", {"steps": 1}) as long,
    ):
        (long / "d").write_text("4")
        raise KeyboardInterrupt
    with open_output(ran, overwrite=True) as output:
        output.clear()
    assert contents(ran) == {"tuning/one/notes.txt": b"mine"}


def test_a_folder_that_became_a_link_is_not_emptied(ran, tmp_path):
    shutil.move(ran / "tuning", tmp_path / "disk")
    (ran / "tuning").symlink_to(tmp_path / "disk")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="by a link"):
        open_output(ran, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "shut").mkdir(mode=0o555)
    with pytest.raises(UserError, match="shut"):
        open_output(tmp_path / "shut" / "out")


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(UserError, match="file"):
        open_output(tmp_path / "f")
    with pytest.raises(UserError, match="folder"):
        check_output_file(tmp_path, [], overwrite=True)


def test_an_output_file_replaces_its_own_kind_alone(tmp_path):
    path = tmp_path / "ranking.json"
    check_output_file(path, [], overwrite=False, marks=["heads"])
    path.write_text('{"heads": []}')
    check_output_file(path, [], overwrite=True, marks=["heads"])
    for content, options in (('{"heads": []}', {"overwrite": False}), ("[1]", {"overwrite": True}), ("x", {"overwrite": True})):
        path.write_text(content)
        with pytest.raises(UserError):
            check_output_file(path, [], marks=["heads"], **options)
    with pytest.raises(UserError, match="reads"):
        check_output_file(path, [path], overwrite=True)


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_written_text_is_read_back(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("t") / "new" / "file"
    write_text(path, text)
    assert path.read_bytes().decode() == text
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.write_bytes(b"\xff"), os.mkfifo, lambda p: None])
def test_what_cannot_be_read_is_one_line(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(UserError, match="x"):
        read_text(tmp_path / "x")


def test_the_digest_of_a_folder_leaves_out_compiled_python_and_nothing_else(tmp_path):
    folder = tmp_path / "__pycache__" / "tasks"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "mine.yaml").write_text("task: mine")
    before = file_digest(folder)
    (folder / "__pycache__" / "utils.pyc").write_bytes(b"0")
    assert file_digest(folder) == before
    (folder / "mine.yaml").write_text("task: yours")
    assert file_digest(folder) != before
