"""The paper's studies run on the built-in models, and say what was measured."""

import pytest

from surgery.errors import UserError
from surgery.studies import Findings, make, studies
from tests.conftest import ROOT

RECIPES = sorted((ROOT / "recipes" / "paper").glob("*.yaml"))
FEW = ("--set", "locate.examples=10", "--set", "locate.options.pairs=8")
MORE = {  # what a recipe needs beside that: smaller sizes, or enough examples for heads to have roles
    "kv-sweep": ("--set", "study.pairs=[4,8]"),
    "mixing-matrices": ("--set", "study.other=checkpoints/tiny-hybrid"),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(recipe, surgery, tmp_path, monkeypatch):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    more = MORE.get(recipe.stem, ())
    status, printed, error = surgery("run", recipe, *FEW, *more, "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    assert findings.study in studies()
    assert findings.summary.split("\n")[0][:40] in printed.replace("\n", "")
    assert all(0 <= figure.ci95[0] <= figure.ci95[1] <= 1 for row in findings.rows for figure in row.figures.values())
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    # Findings that are there are not made again; another recipe's are not taken for this one's.
    (tmp_path / "out" / "findings.json").write_text(findings.model_copy(update={"summary": "read"}).model_dump_json())
    assert "read" in surgery("run", recipe, *FEW, *more, "--out", "out", "--resume")[1]
    assert surgery("run", recipe, *FEW, *more, "--set", "seed=7", "--out", "out", "--resume")[0] == 2


def test_every_study_has_a_recipe_and_says_what_was_published():
    named = {Findings.read(path).study for path in (ROOT / "recipes" / "paper").glob("*.findings.json")}
    assert named == set(studies())
    assert all(study.published and study.title for study in studies().values())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"name": "sweeping"}, "no study is named 'sweeping'; there are crucial_heads,"),
        ({"name": "kv_sweep", "size": 3}, "the study 'kv_sweep': unknown key 'size'"),
        ({"name": "replacement"}, "the study 'replacement': other: "),
    ],
)
def test_what_does_not_exist_is_refused(options, complaint):
    with pytest.raises(UserError, match=complaint):
        make(**options)
