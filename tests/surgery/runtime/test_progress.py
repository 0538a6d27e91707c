"""Lines, bars, processes, and what the package knows of itself without importing it."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgery.errors import UserError
from surgery.runtime import listing, processes
from surgery.runtime.processes import FreshPython, on_main
from surgery.runtime.progress import bar, duration, printable, say, size


def test_a_bar_passes_everything_on(capsys):
    assert list(bar(range(5), "work")) == [0, 1, 2, 3, 4]
    assert list(bar((n for n in bar(range(3), "inner")), "outer", total=3)) == [0, 1, 2]
    assert list(bar([], "nothing")) == []
    assert capsys.readouterr().out == ""


def test_a_bar_that_is_left_early_leaves_room_for_the_next():
    for _ in bar(range(5), "work"):
        break
    assert list(bar(range(2), "work")) == [0, 1]


def test_what_is_said_goes_to_standard_error_once(capsys, monkeypatch):
    say("one")
    monkeypatch.setenv("RANK", "1")
    say("two")
    assert capsys.readouterr() == ("", "one\n")


@given(st.text())
def test_nothing_that_is_printed_steers_a_terminal(text):
    assert all(c.isprintable() or c in "\n\t" for c in printable(text))


@pytest.mark.parametrize(("value", "said"), [(0, "0 bytes"), (83_968, "82 KiB"), (1.1 * 2**30, "1.1 GiB"), (2**50, "1024 TiB")])
def test_bytes_in_words(value, said):
    assert size(value) == said


@pytest.mark.parametrize(("value", "said"), [(40, "40 s"), (200, "3 min"), (9000, "2.5 h")])
def test_seconds_in_words(value, said):
    assert duration(value) == said


def test_alone_the_main_process_does_the_work():
    assert on_main(lambda: 3)() == 3
    with pytest.raises(ZeroDivisionError):
        on_main(lambda: 1 / 0)()


ECHO = """
import json, os, sys
request = json.loads(sys.stdin.read())
if request["fail"]:
    raise ValueError("it failed")
print(json.dumps([sys.path, os.environ.get("PYTHONPATH"), os.environ["HF_HUB_OFFLINE"]]))
"""


def test_a_fresh_process_is_apart_from_this_folder_and_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "script.py"
    script.write_text(ECHO)
    with FreshPython(script) as process:
        process.send({"fail": False})
        path, inherited, offline = json.loads(process.receive())
    assert str(tmp_path) not in path
    assert str(script.parent) not in path
    assert (inherited, offline) == (None, "1")
    with FreshPython(script) as process:
        process.send({"fail": True})
        with pytest.raises(UserError, match="it failed"):
            process.receive()
    assert processes.is_main()


def test_names_are_listed_without_an_import():
    before = set(sys.modules)
    assert "kv" in listing.list_modules("probes", "PROBE")
    assert {"mamba2", "mamba"} <= set(listing.list_modules("modeling", "FAMILY"))
    for file, table in (("evaluation/suites.py", "SUITES"), ("evaluation/controls.py", "CONTROLS")):
        known = listing.list_table(file, table)
        assert known
        assert all(known.values())
    assert set(sys.modules) == before
