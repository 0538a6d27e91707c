"""Ctrl-C ends with one line, which says by which command the job goes on."""

import os
import signal
import sys
import time

import pytest

from surgery.jobs import interruption, output_folder
from surgery.jobs.interruption import continuation


@pytest.mark.parametrize(
    ("argv", "begun", "command"),
    [
        ("surgery run demo.yaml", True, "surgery run demo.yaml --resume"),
        ("surgery run demo.yaml --resume --set tune.steps=3", True, "surgery run demo.yaml --set tune.steps=3 --resume"),
        ("surgery bench base a --overwrite", True, "surgery bench base a --resume"),
        ("surgery bench base a --overwrite", False, "surgery bench base a --overwrite"),  # the earlier run is still there
        ("surgery prune base", True, "surgery prune base --overwrite"),  # has no --resume
        ("/x/surgery/__main__.py tune h --out t", True, "python -m surgery tune h --out t --resume"),
    ],
)
def test_the_command_that_goes_on(argv, begun, command):
    assert continuation(argv.split(), begun=begun) == command


def test_what_a_shell_would_take_apart_is_quoted():
    argv = ["/no/such place/surgery", "locate", "m", "--set", "locate.options={pairs: 4}"]
    assert continuation(argv, begun=True) == "'/no/such place/surgery' locate m --set 'locate.options={pairs: 4}' --resume"
    assert continuation(argv, begun=True, launched=True).startswith("accelerate launch ... -m surgery locate")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_verb_with_one_line(surgery, monkeypatch, tmp_path, number, status):
    """The verb is stopped after its folder was made ready."""
    from surgery.jobs import locating_stage

    before = signal.getsignal(number)

    def stopped(recipe, out, **_):
        output_folder.begin(out, "locate", recipe)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(locating_stage, "locate_model", stopped)
    (tmp_path / "base").mkdir()
    code, out, err = surgery("locate", "./base", "--out", "here", "--set", "locate.examples=4")
    assert (code, out) == (status, "")
    assert err == "surgery: interrupted; to go on: surgery locate ./base --out here --set locate.examples=4 --resume\n"
    assert signal.getsignal(number) is before
    output_folder.check_folder(tmp_path / "here", "locate", resume=True)


def test_a_second_signal_is_not_held_back():
    """What ends in an orderly way may hang: the second Ctrl-C is the system's own."""
    second = []

    def work():
        with interruption.listening():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                second.append(signal.getsignal(signal.SIGINT))

    with pytest.raises(interruption.Interrupted):
        work()
    assert second == [signal.SIG_DFL]


def test_a_signal_that_python_drops_comes_again():
    """What is raised within a destructor goes no further."""

    class Ending:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def work():
        with interruption.listening():
            ending = Ending()
            del ending
            time.sleep(30)

    hook = sys.unraisablehook
    with pytest.raises(interruption.Interrupted):
        work()
    assert sys.unraisablehook is hook
