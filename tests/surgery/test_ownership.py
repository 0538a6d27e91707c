"""What is ours: written whole or not at all, and the only thing that is ever replaced or removed."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest

from surgery.errors import UserError
from surgery.figures.plotting import drawing
from surgery.jobs.output_folder import begin, check_folder, is_empty
from surgery.locating.heads import Heads
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.record import write_text
from surgery.runtime.ownership import folder, replacing, steps
from surgery.runtime.ownership.files import check_free, job, put, remove, tidy, writing
from surgery.runtime.ownership.folder import RECORD, OwnedFolder
from surgery.runtime.ownership.replacing import building
from tests.models import names

NOT_OURS = "was not written by this toolkit, or was changed since"


def built(path, **files):
    """A folder of ours."""
    with building(path) as new:
        with new.filling() as place:
            for name, text in files.items():
                (place / name).write_text(text)
        new.replace()
    return path


@pytest.fixture(params=["system", "without files that have no name, links and exchanges"])
def system(request, monkeypatch):
    """The file system as it is here, and a poorer one."""
    if request.param != "system":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        monkeypatch.setattr(steps, "exchange", lambda *_: False)

        def no_links(*_, **__):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", no_links)


def test_a_file_in_a_folder_of_ours_is_replaced_and_the_users_is_not(tmp_path, system):
    with writing(tmp_path):
        put(tmp_path / "a" / "b.txt", b"one")
        put(tmp_path / "a" / "b.txt", b"two")
        (tmp_path / "a" / "mine.txt").write_text("mine")
        with pytest.raises(UserError, match=NOT_OURS):
            put(tmp_path / "a" / "mine.txt", b"ours")
        (tmp_path / "a" / "b.txt").write_text("edited")
        with pytest.raises(UserError, match=NOT_OURS):
            put(tmp_path / "a" / "b.txt", b"three")
        with pytest.raises(UserError, match=NOT_OURS):
            remove(tmp_path / "a")
        assert tidy(tmp_path / "a") == [tmp_path / "a" / "b.txt", tmp_path / "a" / "mine.txt"]
    assert names(tmp_path) == ["a", "a/b.txt", "a/mine.txt"]
    assert ((tmp_path / "a" / "b.txt").read_text(), (tmp_path / "a" / "mine.txt").read_text()) == ("edited", "mine")


def test_what_appears_between_the_look_and_the_swap_stays(tmp_path, system, monkeypatch):
    """The user saves a file while ours is being written."""
    own = steps.install

    def late(source, target, expected):
        target.write_text("mine")
        own(source, target, expected)

    monkeypatch.setattr(steps, "install", late)
    plan = Plan(sites=("L1.H3",))
    with monkeypatch.context() as before:
        before.setattr(steps, "install", own)
        plan.write(tmp_path / "plan.json")
    with pytest.raises(UserError, match=NOT_OURS):
        Plan(sites=("L1.H5",)).write(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == "mine"
    assert names(tmp_path) == ["plan.json"]


def test_a_plan_replaces_a_plan_of_ours_and_no_other_file(tmp_path):
    path = tmp_path / "plan.json"
    Plan(sites=("L1.H3",)).write(path)
    path.chmod(0o640)
    Plan(sites=("L1.H5",)).write(path)
    assert Plan.read(path).sites == Plan(sites=("L1.H5",)).sites
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    content = path.read_text()
    others = ("", "weights", "{}", content.replace("L1.H5", "L1.H6"), content + " ", json.dumps({"schema_version": 3}))
    for other in others:
        path.write_text(other)
        with pytest.raises(UserError, match=NOT_OURS):
            Plan(sites=("L1.H3",)).write(path)
        with pytest.raises(UserError, match=NOT_OURS):
            Plan.check_place(path)
        assert path.read_text() == other
    assert names(tmp_path) == ["plan.json"]


def test_a_plan_that_was_edited_is_still_read(tmp_path):
    Plan(sites=("L1.H3",)).write(tmp_path / "plan.json")
    edited = (tmp_path / "plan.json").read_text().replace("L1.H3", "L1.H6")
    (tmp_path / "plan.json").write_text(edited)
    assert Plan.read(tmp_path / "plan.json") == Plan(sites=("L1.H6",))


def test_links_are_followed_to_our_own_files_and_refused_in_our_folders(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    Plan(sites=("L1.H3",)).write(tmp_path / "elsewhere" / "plan.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "elsewhere" / "plan.json")
    Plan(sites=("L1.H5",)).write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.read(tmp_path / "elsewhere" / "plan.json") == Plan(sites=("L1.H5",))
    with writing(tmp_path / "out"):
        (tmp_path / "out" / "cells").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UserError, match="cells is a link, which is not followed here"):
            put(tmp_path / "out" / "cells" / "a.json", b"")
        (tmp_path / "out" / "b").symlink_to(tmp_path / "elsewhere" / "plan.json")
        with pytest.raises(UserError, match="is a link"):
            put(tmp_path / "out" / "b", b"")
    built(tmp_path / "target", a="old")
    (tmp_path / "to").symlink_to(tmp_path / "target")
    built(tmp_path / "to", b="new")
    assert (tmp_path / "to").is_symlink()
    assert names(tmp_path / "target") == ["b"]


def test_a_folder_is_replaced_only_if_all_of_it_is_ours(tmp_path, system):
    target = built(tmp_path / "out", a="1", b="2")
    built(target, a="2")
    for name, content in (("thesis.txt", "years of work"), ("a", "edited")):
        before = (target / name).read_text() if (target / name).exists() else None
        (target / name).write_text(content)
        with pytest.raises(UserError, match="which this toolkit did not write, or which was changed since"):
            check_free(target)
        with pytest.raises(UserError, match=NOT_OURS):
            built(target, a="3")
        assert (target / name).read_text() == content
        (target / name).unlink() if before is None else (target / name).write_text(before)
    (target / "empty").mkdir()
    with pytest.raises(UserError, match=NOT_OURS):
        built(target, a="3")
    (target / "empty").rmdir()
    (target / "b").symlink_to(target / "a")
    with pytest.raises(UserError, match=NOT_OURS):
        built(target, a="3")
    (target / "b").unlink()
    built(target, a="3")
    assert names(tmp_path) == ["out", "out/a"]
    assert (target / "a").read_text() == "3"


def test_a_file_that_appears_while_a_folder_is_built_is_kept(tmp_path, system):
    target = built(tmp_path / "out", a="1")
    with pytest.raises(UserError, match=f"thesis.txt' {NOT_OURS}"), building(target) as new:  # noqa: PT012
        with new.filling() as place:
            (place / "a").write_text("2")
        (target / "thesis.txt").write_text("years of work")
        new.replace()
    assert ((target / "thesis.txt").read_text(), (target / "a").read_text()) == ("years of work", "1")
    assert names(tmp_path) == ["out", "out/a", "out/thesis.txt"]


def test_a_strangers_file_in_the_hidden_folder_stays_and_is_named(tmp_path, capsys):
    with pytest.raises(UserError, match=r"thesis\.txt"), building(tmp_path / "out") as new:  # noqa: PT012
        with new.filling() as place:
            (place / "a").write_text("1")
        (new.place / "thesis.txt").write_text("years of work")
        new.replace()
    (left,) = tmp_path.iterdir()
    assert names(left) == ["thesis.txt"]
    assert f"{left} stays: it holds 'thesis.txt', which is not ours" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("content", ["", "[]\n", '{"mamba-surgery": 1, "token": "x", "seal": "y"}\n', "\0\n"])
def test_a_record_that_we_did_not_write_grants_nothing(tmp_path, content):
    (tmp_path / "photo.jpg").write_text("photo")
    (tmp_path / RECORD).write_text(content)
    for work in (
        lambda: check_free(tmp_path), lambda: check_folder(tmp_path, "run", overwrite=True), lambda: built(tmp_path, a="1"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"is damaged, or was not written by this toolkit"):
            work()
    assert names(tmp_path) == ["photo.jpg"]
    assert (tmp_path / RECORD).read_text() == content


def test_no_line_of_a_record_can_be_changed_or_lead_elsewhere(tmp_path):
    target = built(tmp_path / "out", a="1")
    lines = (target / RECORD).read_text()
    for now in (lines.replace('"a"', '"thesis.txt"'), lines.replace('"a"', '"../thesis.txt"'), lines[1:], lines + "{}\n"):
        (target / RECORD).write_text(now)
        with pytest.raises(UserError, match="is damaged"):
            OwnedFolder(target)
    token = json.loads(lines.splitlines()[0])["token"]
    for name in ("../thesis.txt", "/etc/passwd", "a/../../b", "", ".", RECORD):
        line = folder._sealed({"file": name, "sha256": "0"}, token).decode()
        (target / RECORD).write_text(lines + line)
        with pytest.raises(UserError, match="is damaged"):
            OwnedFolder(target)


def test_a_line_that_was_cut_short_counts_for_nothing_and_is_no_harm(tmp_path):
    with writing(tmp_path):
        put(tmp_path / "a", b"1")
    whole = (tmp_path / RECORD).read_bytes()
    (tmp_path / RECORD).write_bytes(whole + b'{"file": "b", "sha')
    with writing(tmp_path):
        put(tmp_path / "c", b"1")
    assert b'"sha\n' not in (tmp_path / RECORD).read_bytes()
    assert {*OwnedFolder(tmp_path).files} >= {"a", "c"}


def test_a_record_moved_to_another_folder_is_about_nothing_there(tmp_path):
    """A copy beside photographs, and beside a hidden folder of a name like ours."""
    for name in ("out", ".out-new-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("mine")
        shutil.copy(built(tmp_path / "source", a="1") / RECORD, tmp_path / name / RECORD)
    with pytest.raises(UserError, match=NOT_OURS):
        built(tmp_path / "out", a="1")
    built(tmp_path / "source", a="2")
    assert names(tmp_path / "out") == names(tmp_path / ".out-new-0123abcd") == ["model.safetensors"]


def test_names_like_ours_are_not_swept(tmp_path):
    theirs = (".out-new-abcdefgh", ".out-new-0123abcd", ".out-old", ".a.json-new-01234567")
    for name in theirs:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("mine")
    with writing(tmp_path / "run"):
        (tmp_path / "run" / ".a.json-new-01234567").write_text("mine")
        put(tmp_path / "run" / "a.json", b"{}")
        built(tmp_path / "run" / "checkpoint-3", a="1")
    begin_again = OwnedFolder(tmp_path / "run")
    replacing.sweep(begin_again)
    built(tmp_path / "out", a="1")
    assert (tmp_path / "run" / ".a.json-new-01234567").read_text() == "mine"
    assert [(tmp_path / name / "model.safetensors").read_text() for name in theirs] == ["mine"] * 4


def test_a_killed_builders_folder_is_swept_and_a_living_ones_is_not(tmp_path):
    killed = """
import os, sys
from pathlib import Path
from surgery.runtime.ownership.replacing import building
with building(Path(sys.argv[1])) as new, new.filling() as place:
    (place / "model.safetensors").write_text("half")
    (place / ".tmpAb12Cd").write_text("half")
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", killed, tmp_path / "out"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 1
    with building(tmp_path / "out") as new:
        built(tmp_path / "out", a="1")
        assert names(tmp_path) == sorted([new.place.name, "out", "out/a"])
    assert names(tmp_path) == ["out", "out/a"]


def test_modes_are_the_umasks_or_those_of_what_was_there(tmp_path):
    before = os.umask(0o077)
    try:
        built(tmp_path / "out", a="1")
        write_text(tmp_path / "x", "1")
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out", tmp_path / "out" / "a", tmp_path / "x")]
        assert modes == [0o700, 0o600, 0o600]
        os.umask(0o022)
        (tmp_path / "out").chmod(0o755)
        (tmp_path / "out" / "a").chmod(0o640)
        built(tmp_path / "out", a="2", b="2")
        modes = [stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) for name in (".", "a", "b")]
        assert modes == [0o755, 0o640, 0o644]
    finally:
        os.umask(before)


def test_a_removed_folder_is_never_seen_in_part(tmp_path, monkeypatch):
    with writing(tmp_path):
        built(tmp_path / "checkpoint-1", a="1", b="2")
        clear, seen = OwnedFolder.clear, []
        monkeypatch.setattr(OwnedFolder, "clear", lambda folder, *rest: seen.append(names(tmp_path)) or clear(folder, *rest))
        remove(tmp_path / "checkpoint-1")
    assert "checkpoint-1" not in seen[0]
    assert names(tmp_path) == []


def test_a_figure_on_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(UserError, match=r"^cannot write .*figure.png: No space left on device$"),
        drawing(tmp_path / "figure.png", height=1),
    ):
        pass
    assert names(tmp_path) == []


def test_a_folder_in_which_a_run_was_killed_at_once_is_empty(tmp_path):
    with writing(tmp_path):
        put(tmp_path / ".run.json-new-01234567", b"{}")
    assert is_empty(tmp_path)
    check_folder(tmp_path, "run", resume=True)
    with job():
        begin(tmp_path, "run", Recipe(model="base"), resume=True)
    assert names(tmp_path) == ["recipe.yaml", "run.json"]


def test_killed_while_an_earlier_run_is_removed_it_is_still_a_run(tmp_path, monkeypatch):
    """Whatever is gone already, --overwrite and --resume go on."""
    place = tmp_path / "out"
    for after in range(6):
        with job():
            begin(place, "run", Recipe(model="base"), overwrite=True)
            for name in ("ranking.json", "plan.json", "cells/a.json"):
                put(place / name, b"{}")
            built(place / "hybrid", plan="{}")
        steps, own = iter(range(after)), OwnedFolder.tidy

        def dies(folder, path, steps=steps, own=own):
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return own(folder, path)

        monkeypatch.setattr(OwnedFolder, "tidy", dies)
        try:
            with job():
                begin(place, "run", Recipe(model="base"), overwrite=True)
        except KeyboardInterrupt:
            check_folder(place, "run", overwrite=True)
            if not is_empty(place):
                check_folder(place, "run", resume=True)
        monkeypatch.undo()


def test_overwrite_leaves_what_is_not_ours(tmp_path):
    """Plans and hybrids lie in the folder of a ranking; so may a thesis."""
    with job():
        begin(tmp_path, "locate", Recipe(model="base"))
        put(tmp_path / "ranking.json", b"{}")
        put(tmp_path / "locate" / "a", b"{}")
    theirs = ("plan.json", "spliced/model.safetensors", "locate/thesis.txt", "jobs/mine.txt", "seed-data/x", "bases/y")
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    with job():
        begin(tmp_path, "locate", Recipe(model="base"), overwrite=True)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {*theirs, "run.json", "recipe.yaml", RECORD}
    for edited in ("recipe.yaml", "ranking.json"):
        (tmp_path / edited).write_text("edited")
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(UserError, match=f"{edited}' {NOT_OURS}"):
                check_folder(tmp_path, "locate", **how)
        (tmp_path / edited).unlink()


def test_the_array_file_of_a_large_ranking_takes_no_other_files_place(tmp_path):
    from surgery.locating import heads_file

    (tmp_path / "model.safetensors").write_text("weights")
    heads = Heads.of(())
    arrays = heads_file.write(heads, tmp_path / "model.json")
    assert arrays.file != "model.safetensors"
    assert (tmp_path / "model.safetensors").read_text() == "weights"


PRINTS = """
import errno, os, sys
from surgery.cli import app

def full():
    raise OSError(errno.{name}, os.strerror(errno.{name}), "x/file")

app.app = full
sys.argv = ["surgery", "run", "r"]
app.main()
"""


@pytest.mark.parametrize(("name", "status"), [("ENOSPC", 2), ("ENOENT", 1)])
def test_what_a_library_cannot_write_is_one_line_too(name, status):
    """And an error of another kind, which is a mistake of ours, keeps its traceback."""
    done = subprocess.run([sys.executable, "-c", PRINTS.format(name=name)], capture_output=True, text=True, check=False)
    assert done.returncode == status
    line = f"surgery: cannot write x/file: {os.strerror(getattr(errno, name))}\n"
    assert (done.stderr == line) is (status == 2)


def test_what_a_killed_writer_of_a_file_left_is_removed_by_the_next(tmp_path):
    """If it is whole and ours; the user's file of such a name stays."""
    place = tmp_path / "plan.json"
    place.write_bytes(b"ours 1")
    (tmp_path / ".plan.json-new-01234567").write_bytes(b"ours 2")
    (tmp_path / ".plan.json-new-89abcdef").write_bytes(b"mine")
    put(place, b"ours 3", own=lambda content: content.startswith(b"ours"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "plan.json": b"ours 3", ".plan.json-new-89abcdef": b"mine",
    }  # fmt: skip
