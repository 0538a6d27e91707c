"""Recipes: what is read, what is refused, and how many settings there are."""

import tomllib
from pathlib import Path

import pytest
import yaml

from surgery.errors import UserError
from surgery.records.recipe import GONE, Recipe, list_settings, make_recipe, read_recipe, recipe_text
from surgery.records.record import provenance
from surgery.runtime.yaml import parse_yaml

ROOT = Path(__file__).parents[3]


def test_settings_stay_within_the_budget():
    assert len(list(list_settings())) <= tomllib.loads((ROOT / "budget.toml").read_text())["most"]["settings"]


def test_every_setting_says_what_it_means():
    assert [key for key, field in list_settings() if not field.description] == []


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_of_the_repository_are_read(path):
    recipe = read_recipe(path)
    assert make_recipe(parse_yaml(recipe_text(recipe), "again"), "again") == recipe


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("bench.pairs=16", (16,)),
        ("bench.pairs=[16, 64]", (16, 64)),
        ("bench.suites=kv,text", ("kv", "text")),
        ("bench.controls=[]", ()),
        ("tune.steps=auto", "auto"),
        ("tune.mixed_precision=no", None),
        ("tune.report_to=none", ()),
        ("tune.steps=1_000", 1000),
        ("tune.gradient_checkpointing=on", True),
        ("plan.keep_skills=no", False),
        ("data.train_text=[no, 2026-01-01]", ("no", "2026-01-01")),
        ("plan.share=null", None),
        ("locate.exact=true", 1.0),
    ],
)
def test_values_are_taken_as_users_write_them(setting, value):
    section, _, name = setting.partition("=")[0].partition(".")
    assert getattr(getattr(read_recipe(None, [setting], model="m"), section), name) == value


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("tune.stps=4", "tune.steps"),
        ("tune.steps=4.5", "tune.steps"),
        ("tune.steps=yes", "tune.steps"),
        ("tune.steps=1:30", "tune.steps"),
        ("tune.steps=010", "tune.steps"),
        ("tune.steps=", "tune.steps"),
        ("bench.pairs=[1:30]", "bench.pairs"),
        ("plan.gate=true", "plan.gate"),
        ("plan.donor_layers={L3: true}", "plan.donor_layers.L3"),
        ("tune.report_to=wanb", "tune.report_to"),
        ("tune.examples=kv", "tune.examples: Input should be a list"),
        ("tune={steps:300}", "tune.steps:300"),
        ("tune.=3", "'tune.'"),
        ("locate.probe=needel", "needle"),
        ("bench.suites=quik", "quick"),
        ("bench.controls=[tunde]", "bench.controls: there is no control 'tunde' (did you mean tuned?)"),
        ("plan.sites=L1", "plan.sites: L1 needs"),
        ("plan.sites=1", "plan.sites"),
        ("plan.donor=x", "donor"),
        ("tune.examples=[]", "examples"),
        ("tune={steps: auto, examples: [], bigram_weight: 1}", "tune.steps: auto asks for the loss on examples"),
        ("bench.controls=[adapters]", "bench.controls: adapters are those of tune.lora"),
        ("data.skills=[needle]", "data.skills"),
        ("data.train_text=[]", "data.train_text"),
        ("tune.hints.weight=0", "weight"),
        ("dtype=int8", "dtype"),
        ("seed=-1", "seed"),
        ("tune", "KEY=VALUE"),
        ("tune.steps.x=1", "steps"),
        ("tune.steps=[", "tune.steps"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(setting, named):
    settings = ["tune.steps=3", setting] if setting.startswith("tune.steps.") else [setting]
    with pytest.raises(UserError) as caught:
        read_recipe(None, settings, model="m")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [f"{section}.{name}".lstrip(".") for section, names in GONE.items() for name in names.split()])
def test_settings_that_went_name_the_last_version_that_had_them(key):
    with pytest.raises(UserError, match=r"0\.30\.0"):
        read_recipe(None, [f"{key}=1"], model="m")


def test_a_record_names_no_folder_of_this_machine(tmp_path):
    recipe = make_recipe({"model": str(tmp_path / "base"), "data": {"train_text": [str(tmp_path / "a.txt")]}}, "test")
    assert str(tmp_path) not in yaml.safe_dump(recipe.public())


BOMB = "a: &a [1, 2]\nb: &b [*a, *a]\n"


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a: {<<: {b: 1}}",
        "a: 1\na: 2",
        "!!python/object/apply:os.system [true]",
        "[" * 3000,
        "a: !!timestamp x",
        "a: [1",
        "- ? {a: 1}\n  : 2",
        "\x00",
        "x" * (2**20 + 1),
    ],
    ids=["alias", "merge", "twice", "python", "deep", "tag", "open", "key", "control", "long"],
)
def test_yaml_that_cannot_be_used_is_one_line(text):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "the text")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "- 1", "model: [", b"\xff"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content):
    path = tmp_path / "r.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError):
        read_recipe(path)


def test_a_recipe_needs_a_model():
    with pytest.raises(UserError, match="model"):
        make_recipe({}, "test")
    assert Recipe(model="m").tune.steps > 0


def test_a_record_names_a_base_without_the_place_where_it_lies(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    names = {".": "tiny", "./a": "a", "a/": "a", "..": tmp_path.name, "me/model": "me/model", str(tmp_path / "x" / "y"): "y"}
    assert {name: provenance(name, "0", 0).base for name in names} == names
