"""The gate: what a requirement may say, whom it concerns, and by how much it is missed."""

import re
import shutil

import pytest

from surgery.commands.gate import requirement
from surgery.errors import UserError
from surgery.evaluation.report import Report
from surgery.world.tokenizer import build_tokenizer
from tests.models import ROOT, VOCABULARY, random_base

TASKS = ["kv.4", "kv.64", "knowledge", "letters", "perplexity"]


@pytest.fixture(scope="module")
def report() -> Report:
    """Of the base and two hybrids: .287, .734 and .944 at 64 pairs; perplexity 5.853, 5.858 and 5.869."""
    whole = Report.read(ROOT / "recipes" / "demo-mamba2.report.json")
    return whole.model_copy(update={"models": {name: whole.models[name] for name in ("base", "spliced", "tuned")}})


@pytest.mark.parametrize(
    ("text", "failing"),
    [
        ("kv.64 >= base + 0.3", []),
        ("kv.64 >= base + 0.5", ["spliced"]),
        ("tuned.kv.64 >= base + 0.5", []),
        ("kv.64 >= .9", ["spliced"]),
        ("kv.64<0.1", ["spliced", "tuned"]),
        ("kv.64 >= base + 5e-1", ["spliced"]),
        ("spliced.kv.64 > tuned - 0.1", ["spliced"]),
        ("base.kv.64 <= 0.3", []),
        ("perplexity <= base * 1.001", ["tuned"]),
    ],
)
def test_requirements(report, text, failing):
    failures = requirement(text, list(report.models), TASKS).failures(report)
    assert [line.split(" of ")[1].split(" is ")[0] for line in failures] == failing


def test_a_task_that_could_not_be_measured_fails(report):
    asked = requirement("needle.4096.50 >= 0.5", list(report.models), [*TASKS, "needle.4096.50"])
    assert asked.failures(report) == [
        f"requirement 'needle.4096.50 >= 0.5' failed: needle.4096.50 of {name} was not measured"
        for name in ("spliced", "tuned")
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kv.64", "takes 'no loss', TASK >= NUMBER"),
        ("kv.64 >= ", "takes 'no loss', TASK >= NUMBER"),
        ("kv.64 >= base / 2", "takes 'no loss', TASK >= NUMBER"),
        ("kv.63 >= 1", "'kv.63' is not measured; there are kv.4"),
        ("kv.64 >= other + 0.1", "no model is named 'other';"),
        ("perplexity <= base*1.01", "no model is named 'base*1.01' (put blanks around +, - and *);"),
        ("kv.64 >= nan", "no model is named 'nan'"),
        ("kv.64 >= 0.5 and knowledge >= 0.5", "takes 'no loss', TASK >= NUMBER"),
    ],
)
def test_what_cannot_be_read_is_refused(text, complaint):
    with pytest.raises(UserError, match=re.escape(complaint)):
        requirement(text, ["base", "spliced", "tuned"], TASKS)


def test_the_command(surgery, capsys, tmp_path):
    """Status 2 and nothing written for what cannot be read; the report and status 1 for what is not met."""
    tokenizer = build_tokenizer()
    random_base(vocab_size=VOCABULARY).save_pretrained(tmp_path / "one")
    tokenizer.save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    capsys.readouterr()
    sizes = "bench={pairs: [4], limit: 6, windows: 2, window: 16, contexts: [16]}"
    for wrong in ("kv.8 >= base", "kv.4 >= nobody + 1", "kv.4 is good"):
        status, _, err = surgery("bench", "one", "copy", "--set", sizes, "--out", "out", "--require", wrong)
        assert (status, err.count("\n")) == (2, 1), err
        assert not (tmp_path / "out").exists()
    status, _, err = surgery("bench", "one", "copy", "./copy", "--out", "out")
    assert (status, err) == (2, "surgery: ./copy is there twice; give each model once\n")
    met, missed = "copy.perplexity <= base * 1.0", "kv.4 >= base + 0.25"
    status, _, err = surgery("bench", "one", "copy", "--set", sizes, "--out", "out", "--require", met, "--require", missed)
    assert status == 1
    assert "requirement 'kv.4 >= base + 0.25' failed: kv.4 of copy is" in err
    assert "off by 0.25" in err
    assert "perplexity <=" not in err
    assert Report.read(tmp_path / "out" / "report.json").models["copy"].change["kv.4"].value == 0
    status, _, err = surgery("bench", "one", "copy", "--set", sizes, "--out", "out", "--require", met, "--resume")
    assert (status, "requirement" in err) == (0, False)
    assert "nothing has changed, and everything is finished" in err
    status, _, err = surgery("bench", "one", "copy", "--set", sizes, "--out", "out")
    assert (status, "out holds an earlier run: --resume goes on with it, --overwrite replaces it" in err) == (2, True)


def test_where_the_tasks_are(surgery):
    status, out, _ = surgery("tasks-path")
    assert status == 0
    assert out.strip().endswith("tasks")
