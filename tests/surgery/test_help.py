"""The examples in every verb's help: each is understood; and executed in one folder, in the order of the pipeline, by the slow
test. Pages of the documentation, whose code runs in tests/docs, have most of them, too."""

import io
import shlex
import shutil
import sys
from contextlib import redirect_stdout

import pytest
import typer

from surgery.cli.app import VERBS, app, main
from surgery.records.recipe import read_recipe
from tests.models import ROOT

# What makes the examples small. The help shows what a user types, who has the time.
LOCATE = "locate.examples=8 locate.batch_size=8 locate.exact=0.1 locate.layers=false"
BENCH = "bench.pairs=4,32 bench.unseen_pairs=[] bench.limit=8 bench.windows=2 bench.contexts=16 bench.batches=1"
SMALLER = {
    "run": f"{LOCATE} {BENCH} tune.steps=2 bench.controls=false",
    "locate": LOCATE,
    "prune": "locate.examples=8",
    "tune": "tune.steps=2 tune.batch_size=2 tune.text_batch_size=1 tune.skill_batch_size=2",
    "bench": BENCH,
}
BRIEF = ("settings", "list", "report-schema", "tasks-path")  # they load no model


def shown(verb: str) -> list[list[str]]:
    """The arguments of the examples that --help shows; what a shell would do with the output is left out."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["surgery", verb, "--help"])
        with pytest.raises(SystemExit):
            main()
    text = out.getvalue().partition("Examples:\n")[2].partition("\n\n")[0]
    commands = [shlex.split(line.partition(" > ")[0]) for line in text.splitlines()]
    assert commands, f"the help of {verb} shows no example"
    assert all(command[:2] == ["surgery", verb] for command in commands), text
    assert max(map(len, text.splitlines())) <= 80, "a terminal would break the line"
    return [command[1:] for command in commands]


@pytest.fixture(autouse=True)
def a_short_look(monkeypatch):
    monkeypatch.setattr("surgery.commands.look.MOST", 12)


def executed(surgery, verbs):
    for verb in verbs:
        settings = [part for setting in SMALLER.get(verb, "").split() for part in ("--set", setting)]
        for arguments in shown(verb):
            status, out, err = surgery(*arguments, *settings)  # of a setting that is given twice, the last counts
            assert status == 0, (arguments, err)
            assert out, arguments


@pytest.fixture
def repository(tmp_path):
    """What the examples name, as it lies in the repository."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", ignore=shutil.ignore_patterns("paper", "*.json", "*.png"))


def understand(verb, *arguments):
    """Raises an error for an option or a setting that does not exist. Nothing is run."""
    command = typer.main.get_command(app).commands[verb]
    for parameter in command.params:
        parameter.callback = None  # which would look for what an earlier verb writes
    given = command.make_context(verb, [*arguments]).params
    if isinstance(given.get("settings"), list):
        read_recipe(None, given["settings"], model="none")


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_is_understood(verb):
    for example in shown(verb):
        understand(*example)


def test_examples_that_load_no_model_run(surgery, repository):
    executed(surgery, BRIEF)


@pytest.mark.slow
def test_all_examples(surgery, repository, tmp_path):
    recipe = tmp_path / "recipes" / "tiny-mamba2.yaml"
    lines = ["steps: 2" if line.startswith("steps:") else line for line in recipe.read_text().splitlines()]
    recipe.write_text("\n".join(lines))
    executed(surgery, VERBS)
