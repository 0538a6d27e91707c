"""README.md does what it says: its commands and its Python run as they stand, and its table is the demo's."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from surgery.evaluation.report import Report
from surgery.studies import Findings
from tests.conftest import ROOT
from tools import fill_pages

README = fill_pages.README.read_text()


@pytest.mark.parametrize("page", fill_pages.PAGES, ids=lambda page: page.parent.name)
def test_the_measured_parts_are_what_their_records_say(page):
    assert fill_pages.filled(page) == page.read_text()


RECORDS = [
    (Report, fill_pages.DEMO, "demo"),
    (Report, fill_pages.MAMBA1, "demo-mamba1"),
    *((Findings, path, path.name.partition(".")[0]) for path in fill_pages.SEEDS),
]


@pytest.mark.parametrize(("kind", "record", "recipe"), RECORDS, ids=[recipe for _, _, recipe in RECORDS])
def test_a_record_is_of_its_recipe(kind, record, recipe):
    from surgery.records.names import public
    from surgery.records.recipe import Recipe, read_recipe

    # A key that is newer than a record had no other value than its default then. Records name no places.
    measured = Recipe.model_validate(public(kind.read(record).provenance.recipe))
    assert measured == Recipe.model_validate(public(read_recipe(ROOT / "recipes" / f"{recipe}.yaml").model_dump(mode="json")))


@pytest.fixture
def workplace(tmp_path) -> Path:
    """A folder with the checkpoints and recipes that the commands name."""
    for name in ("checkpoints", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
def test_the_step_by_step_commands(surgery, workplace):
    commands = [line.split("#")[0].strip() for line in README.splitlines() if re.match(r"    surgery (?!run)", line)]
    # The benchmark takes minutes; tests/surgery/test_doctor.py runs parts of it.
    commands = [command for command in commands if command.split()[1] != "COMMAND" and "--bench" not in command]
    assert [command.split()[1] for command in commands] == ["locate", "plan", "splice", "tune", "bench", "prune", "doctor"]
    for command in commands:
        status, _, err = surgery(*command.split()[1:])
        assert status == 0, f"{command}\n{err}"
    models = json.loads((workplace / "runs/look/bench/report.json").read_text())["models"]
    assert tuple(models) == ("base", "spliced", "tuned")
    assert models["tuned"]["kv"]["32"]["accuracy"] > models["base"]["kv"]["32"]["accuracy"]


@pytest.mark.slow
def test_the_python(workplace):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(blocks) == 2
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=workplace, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].strip() == "80"  # the value that the prompt asks for


def test_every_file_that_it_names_exists():
    for name in re.findall(r"(?:recipes|checkpoints|surgery|kernels|tests|tools)/[\w./-]+\w", README):
        assert (ROOT / name).exists(), name
