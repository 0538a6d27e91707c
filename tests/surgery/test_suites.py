"""What each file of a folder `suites` owes to the protocol, and that a new suite is a new file."""

import inspect
from collections import Counter
from typing import get_args

import pytest

from surgery.errors import UserError
from surgery.evaluation import suites
from surgery.evaluation.results import is_loss, losses
from surgery.evaluation.task import Task
from surgery.records.recipe import Bench, Data, Suite
from surgery.records.sections.benching import SUITES
from surgery.runtime import listing
from surgery.runtime.listing import literals

FILES = suites.files()
HOOKS = {name: value for name, value in vars(suites.Suites).items() if inspect.isfunction(value) and not name.startswith("_")}


def test_of_a_loss_less_is_better():
    assert losses() == {name for file in FILES for name in getattr(file, "LOSSES", ())}
    assert (is_loss("recall_hits.1024"), is_loss("kv.64")) == (True, False)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("quick.py", "", r"quick\.py and .*quick\.py have one name"),
        (
            "rhymes.py",
            "PLACE: int = 55\nSUITES = dict(rhymes='?')\n",
            r"rhymes\.py has to say SUITES, written out",
        ),
    ],
)
def test_a_file_that_hides_another_or_says_too_little_is_named(tmp_path, monkeypatch, name, text, complaint):
    file = tmp_path / "surgery" / "more" / "suites" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setattr(listing, "ROOTS", (*listing.ROOTS, tmp_path / "surgery"))
    with pytest.raises(UserError, match=complaint):
        literals("suites", "PLACE", "SUITES")


def test_settings_read_off_the_text_what_the_files_hold():
    assert {name: said for file in FILES for name, said in file.SUITES.items()} == SUITES
    assert get_args(Suite) == tuple(SUITES)
    assert [*Counter(file.PLACE for file in FILES).values()] == [1] * len(FILES) == [1] * len(literals("suites"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__.rpartition(".")[2])
def test_a_file_keeps_to_the_protocol(file):
    for name, hook in HOOKS.items():
        if hasattr(file, name):
            _self, *wanted = inspect.signature(hook).parameters
            assert [*inspect.signature(getattr(file, name)).parameters] == wanted, name
    assert hasattr(file, "names") == hasattr(file, "tasks") or hasattr(file, "pooled")
    assert getattr(file, "LENGTHS", "only") in ("only", "also")


def test_a_suite_that_is_not_asked_for_has_nothing_to_give(tokenizer):
    for file in FILES:
        other = Bench(suites=("language" if "quick" in file.SUITES else "quick",))
        for name, more in {"probes": (Data(),), "names": (), "timings": ([8],), "tasks": (tokenizer, Data(), 0)}.items():
            assert not (hasattr(file, name) and getattr(file, name)(other, *more)), (file.__name__, name)


def test_a_new_suite_is_a_new_file(tokenizer, monkeypatch):
    class Rhymes:
        PLACE, SUITES = 55, {"rhymes": "Whether it rhymes."}

        @staticmethod
        def names(options):
            return ["rhymes"] if "quick" in suites.measured(options) else []

        @staticmethod
        def tasks(options, tokenizer, data, seed):
            return [Task(name, seed, name, lambda model: None) for name in Rhymes.names(options)]

    monkeypatch.setattr(suites, "files", lambda: (*FILES, Rhymes))
    options = Bench(pairs=(4,), limit=4, windows=2, window=16)
    assert suites.names(options)[-1] == suites.tasks(options, tokenizer, Data(), 0)[-1].name == "rhymes"
