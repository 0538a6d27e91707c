"""Settings: their old names, where they are listed, and what is said of wrong ones."""

import pytest
import yaml

from surgery.errors import UserError
from surgery.records import renamed
from surgery.records.pretrain_recipe import PretrainRecipe
from surgery.records.recipe import Bench, Lora, Recipe, Tune, changed, read_back, read_recipe
from surgery.records.renamed import RENAMED, current
from tests.conftest import ROOT

OLD = """
model: m
tune: {accumulate: 2, checkpointing: true, warmup: 3, save_every: 7, trackers: [tensorboard], precision: bf16,
       keep: {every: 5}, lora: {kind: dora, targets: [in_proj], rank: 2, alpha: 4, dropout: 0.1}}
bench: {examples: 9, task_examples: 8, tasks_path: x}
"""
NEW = """
model: m
tune: {gradient_accumulation_steps: 2, gradient_checkpointing: true, warmup_steps: 3, save_steps: 7, report_to: [tensorboard],
       mixed_precision: bf16, early_stopping: {eval_steps: 5},
       lora: {use_dora: true, target_modules: [in_proj], r: 2, lora_alpha: 4, lora_dropout: 0.1}}
bench: {limit: 9, task_limit: 8, include_path: x}
"""


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch):
    monkeypatch.setattr(renamed, "_advised", set())


def leaves(tree, section=""):
    for key, value in tree.items():
        yield from leaves(value, f"{section}{key}.") if isinstance(value, dict) else [f"{section}{key}={yaml.safe_dump(value)}"]


@pytest.fixture
def recipes(tmp_path):
    for name, text in (("old", OLD), ("new", NEW)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "old.yaml", tmp_path / "new.yaml"


def test_old_names_are_read_with_one_line_of_advice(recipes, capsys):
    old, new = recipes
    assert read_recipe(old) == read_recipe(new)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("advice: tune.accumulate is now gradient_accumulation_steps, ")
    assert "tune.lora.kind is now use_rslora or use_dora" in line
    assert line.endswith("old names are read until version 1.0")
    read_recipe(old)
    assert capsys.readouterr().err == ""


def test_old_names_in_settings(recipes, capsys):
    settings = list(leaves(yaml.safe_load(OLD)))
    assert len(settings) == 16
    assert read_recipe(None, settings) == read_recipe(recipes[1])
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_old_names_in_python(recipes, capsys):
    given, expected = yaml.safe_load(OLD), read_recipe(recipes[1])
    assert Tune(**given["tune"]) == expected.tune
    assert Bench(**given["bench"]) == expected.bench
    assert Lora(**given["tune"]["lora"]) == expected.tune.lora
    assert Recipe(**given) == expected
    assert PretrainRecipe(architecture={}, warmup=7).warmup_steps == 7
    assert "tune.accumulate is now" in capsys.readouterr().err
    assert changed(Recipe(model="m"), tune=given["tune"]).tune == expected.tune


def test_a_setting_replaces_an_old_name_of_the_file(recipes):
    recipe = read_recipe(recipes[0], ["tune.save_steps=11", "tune.lora.r=3", "bench.examples=4"])
    assert (recipe.tune.save_steps, recipe.tune.lora.r, recipe.bench.limit) == (11, 3, 4)


def test_what_was_written_earlier_is_read_without_advice(recipes, capsys):
    assert read_back(recipes[0]) == read_recipe(recipes[1])
    assert capsys.readouterr().err == ""


def test_both_names_of_one_setting_are_refused():
    for tree in ({"save_steps": 1, "save_every": 1}, {"save_every": 1, "save_steps": 1}):
        with pytest.raises(UserError, match=r"tune\.save_steps is there by its old name, too"):
            Tune(**tree)
    with pytest.raises(UserError, match=r"tune\.lora\.kind: 'adalora' is none of lora, rslora, dora"):
        Lora(kind="adalora", target_modules=("x",))


def test_files_are_written_with_present_names(recipes):
    written = read_recipe(recipes[0]).model_dump(mode="json")
    assert current(written) == written
    for section, names in RENAMED.items():
        branch = written
        for part in section.split("."):
            branch = branch[part] if section != "pretrain" else PretrainRecipe(architecture={}).model_dump()
        assert not set(names) & set(branch)


def test_no_shipped_recipe_uses_an_old_name(capsys):
    for path in (ROOT / "recipes").rglob("*.yaml"):
        if "architecture:" not in path.read_text():
            read_recipe(path)
    assert capsys.readouterr().err == ""
