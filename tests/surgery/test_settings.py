"""Settings: those of earlier versions, where they are listed, and what is said of wrong ones."""

import json
import re
from functools import cache
from typing import get_args

import pytest
import yaml

from surgery.choosing import names as ways
from surgery.cli.sections import rows, sections
from surgery.cli.settings import KINDS
from surgery.cli.used_settings import USED
from surgery.errors import UserError
from surgery.exporting.formats import names as formats
from surgery.jobs.preparing import check_run
from surgery.kernels.dispatch import OPERATIONS
from surgery.more import TASKS
from surgery.pretraining.recipe import read_pretrain_recipe
from surgery.probes import probes
from surgery.records.recipe import Locate, Recipe, Suite, Text, read_recipe
from surgery.records.sections.gone import GONE
from surgery.records.site import Site
from surgery.splicing.load import load
from surgery.studies import studies
from tests.models import ROOT

# As version 0.19 wrote them, with what went since at its default.
OF_019 = """
model: m
tune: {steps: 7, weight_decay: 0.01, lora: {target_modules: [in_proj], r: 2, use_rslora: false, use_dora: false}}
bench: {limit: 9, doses: [], depths: [0.0, 0.5, 1.0], engine_python: null}
"""


def test_recipes_of_earlier_versions_are_read_where_what_went_was_at_its_default(tmp_path):
    (tmp_path / "recipe.yaml").write_text(OF_019)
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert (recipe.tune.steps, recipe.tune.lora.r, recipe.bench.limit) == (7, 2, 9)
    for name, gone in GONE.items():
        if not name.startswith("pretrain"):
            needed = ["tune.lora.target_modules=in_proj"] if "lora" in name else []
            read_recipe(None, [*needed, f"{name}={json.dumps(gone.default)}"], model="m")
    assert read_pretrain_recipe(ROOT / "checkpoints" / "tiny-letters" / "recipe.yaml").letter_sequences


@pytest.mark.parametrize(
    ("given", "share"),
    [({}, 0.05), ({"exact": None}, 0.05), ({"exact": True}, 0.05), ({"exact": False}, 0.0), ({"exact": 0.1}, 0.1)],
)
def test_a_setting_that_went_is_read_as_the_one_that_took_it_over(given, share):
    assert Locate(**given, confirm=0.05).exact == share
    assert Locate.of(None, {**given, "confirm": 0.05}, "locate").exact == share
    assert Locate(**given, confirm=None) == Locate(**given)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("locate.budget=100", "locate.budget: went with version 0.30: set locate.exact: true for all heads"),
        ("bench.doses=[1]", "bench.doses: went with version 0.20: this version does what its default did; leave it out"),
        ("tune.lora={target_modules: in_proj, use_dora: true}", "use_dora: went with version 0.20"),
    ],
)
def test_what_went_is_said_to_have_gone_where_it_was_set(setting, line):
    assert line in said(setting)


def test_every_shipped_recipe_is_read():
    for path in [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "checkpoints").glob("*/recipe.yaml")]:
        (read_recipe if "\nmodel:" in f"\n{path.read_text()}" else read_pretrain_recipe)(path)


def said(*settings, path=None):
    """What is said of wrong settings."""
    with pytest.raises(UserError) as refusal:
        read_recipe(path, ["model=m", *settings])
    return str(refusal.value)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("tune.stpes=7", "unknown key 'tune.stpes'; did you mean tune.steps?"),
        ("steps=7", "unknown key 'steps'; did you mean plan.auto.steps or tune.steps?"),
        ("tune.early_stopping={every_steps: 3}", "did you mean tune.early_stopping.eval_steps?"),
        ("tune.lessons=[{pairs: 8}]", "unknown key 'tune.lessons.0.pairs'; did you mean bench.pairs?"),
        ("xyz=1", "unknown key 'xyz'; `surgery settings` lists the keys"),
        ("tune.steps=many", "tune.steps takes a whole number or 'auto', not 'many'"),
        ("tune.learning_rate=.inf", "tune.learning_rate takes a finite number, not inf"),
        ("plan.kind=lyaer", "plan.kind takes 'head', 'layer' or 'window', not 'lyaer'; did you mean layer?"),
        ("tune.lora=yes", "tune.lora takes keys and values ({} for its defaults), not True"),
        ("seed=2024-99-99", "is not YAML: month must be in 1..12"),
        ("tune.lessons=[{options: {pairs: [8, 4]}}]", "smallest <= largest"),
        ("tune.steps", "key=value"),
        ("model.name=x", "no keys of its own"),
        ("tune.early_stopping={eval_steps:4}", "a space belongs after the colon: 'eval_steps: 4'"),
        (
            "data={facts: x: y}",
            "is not YAML: line 1, column 10: while parsing a flow mapping, expected ',' or '}', but got ':'",
        ),
    ],
)
def test_wrong_settings_are_answered_in_one_line(setting, line):
    assert line in said(setting)
    assert "\n" not in said(setting)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('model: "x\n', "line 2, column 1: while scanning a quoted scalar (begun in line 1), found unexpected end of stream"),
        ("model: \x01\n", "character 8: special characters are not allowed"),
    ],
)
def test_where_a_recipe_is_not_yaml_is_said(text, line, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError) as refusal:
        read_recipe(tmp_path / "x.yaml")
    assert str(refusal.value).startswith(f"{tmp_path / 'x.yaml'} is not YAML: ")
    assert str(refusal.value).endswith(line)
    assert "\n" not in str(refusal.value)


def test_the_source_of_what_is_wrong_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("model: m\nbench: {limit: many}\n")
    assert said(path=path).startswith(f"recipe {path}: bench.limit takes")
    assert said("bench.limit=few", path=path).startswith("--set: bench.limit takes a whole number, not 'few'")
    assert said("bench.limit=7", "plan.kind=layer", "plan.blend=1", path=path).startswith("--set: plan.blend: means nothing")
    assert said("tune.lora.evry=3", "bench.limit=7", path=path).startswith("--set: unknown key 'tune.lora.evry'")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["plan.kind=layer", "plan.blend=0.5"], "plan.blend: means nothing for a layer graft that starts random"),
        (["plan.kind=layer", "plan.heads=2"], "plan.heads: counts heads, and kind is layer; set plan.layers"),
        (["plan.kind=layer", "locate.layers=false"], "locate.layers=false ranks none"),
        (["plan.donor=x", "plan.sites=L1.H0"], "plan.donor: is for kind layer"),
    ],
)
def test_sections_that_contradict_themselves_or_each_other_are_refused(settings, line):
    assert line in said(*settings)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("bench.pairs=16", (16,)),
        ("bench.pairs=16,32", (16, 32)),
        ("bench.suites=quick,speed", ("quick", "speed")),
        ("bench.tasks=", None),
        ("tune.report_to=tensorboard", ("tensorboard",)),
        ("tune.lora.target_modules=in_proj, out_proj", ("in_proj", "out_proj")),
        ("tune.lora.target_modules={in_proj: 2}", {"in_proj": 2}),
        ("tune.mixed_precision=no", None),
        ("plan.sites=L0.H3,5;L1.H2", (Site(0, (3, 5)), Site(1, (2,)))),
        ("data.train_text=a,b.txt", (Text(source="a,b.txt"),)),
        ("study=seeds", {"name": "seeds"}),
    ],
)
def test_values_as_users_write_them(setting, value):
    if value is None and setting.endswith("="):
        assert "takes a list" in said(setting)
        return
    read = read_recipe(None, ["model=m", setting])
    for name in setting.partition("=")[0].split("."):
        read = getattr(read, name)
    assert read == value


def test_settings_below_what_a_written_recipe_leaves_empty(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(Recipe(model="m", study={"name": "seeds"}).model_dump(mode="json")))
    recipe = read_recipe(path, ["tune.hints.weight=3", "study.seeds=2"])
    assert recipe.tune.hints.weight == 3
    assert recipe.study == {"name": "seeds", "seeds": 2}
    assert read_recipe(None, ["model=m", "study=seeds", "study.seeds=2"]).study == {"name": "seeds", "seeds": 2}


def test_the_two_kinds_of_recipe_are_told_apart():
    with pytest.raises(UserError, match=r"tiny-mamba2.yaml is a recipe for `surgery pretrain`"):
        read_recipe(ROOT / "recipes" / "tiny-mamba2.yaml")
    with pytest.raises(UserError, match=r"demo.yaml is a recipe for `surgery run`"):
        read_pretrain_recipe(ROOT / "recipes" / "demo.yaml")
    with pytest.raises(UserError, match="recipe: model is missing"):
        read_recipe(None, [])


def test_every_setting_says_what_it_means():
    known = sections()
    assert [place for place in known if known[place].section != place] == []
    for place in known:
        assert known[place].__doc__.strip()
        for row in rows(place):
            assert row.meaning.endswith((".", ")")), row.key
            assert row.type, row.key
    table = {row.key: row for place in known for row in rows(place)}
    assert table["tune.steps"][1:3] == ("int >= 1 or auto", "150")
    assert table["tune.lessons"][2] == "[{options: {pairs: [4, 64]}}]"
    assert table["tune.lora.target_modules"][2] == ""


def test_defaults_that_are_listed_are_those_that_are_read():
    """What the list gives as default, set, changes nothing."""
    listed = [row for place in ("", "data", "plan", "tune", "bench") for row in rows(place)]
    settings = [f"{row.key}={row.default}" for row in listed if row.default]
    assert len(settings) > 50
    assert read_recipe(None, ["model=m", *settings]) == Recipe(model="m")


NAMES = {
    "probes": probes,
    "suites": lambda: get_args(Suite),
    "studies": studies,
    "formats": formats,
    "ways": ways,
    "kernels": lambda: OPERATIONS,
    "families": lambda: ("mamba", "mamba2", "falcon_mamba", "llamba"),
    "tasks": lambda: [path.stem for path in TASKS.glob("*.yaml")],
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_listed_with_a_meaning(kind, surgery):
    status, out, _ = surgery("list", kind)
    assert status == 0
    entries = re.findall(r"^(\S+)  +\S", out, flags=re.M)
    assert set(NAMES[kind]()) <= set(entries)
    assert all(len(line) <= 80 for line in out.splitlines())


def test_settings_are_listed(surgery):
    status, out, _ = surgery("settings", "tune.lora")
    assert status == 0
    assert re.findall(r"^  (tune\.lora\.\w+)  \[", out, flags=re.M) == [row.key for row in rows("tune.lora")]
    assert "tune.lora.r  [int >= 1; default 8]\n      The rank." in out
    assert surgery("settings")[1].count("\n  ") > 100
    for wrong, meant in {"tune.stpes": "tune.steps?", "TUNE": "tune"}.items():
        status, _, err = surgery("settings", wrong)
        assert (status, f"no section or key '{wrong}'; did you mean {meant}" in err) == (2, True)
    assert "; the sections are data, " in surgery("settings", "nonsense")[2]
    assert "did you mean probes?" in surgery("list", "probe")[2]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("locate", "o/m", "--set", "bench.limit=3"), "surgery locate has no use for bench.limit; it uses tokenizer, "),
        (("locate", "o/m", "--set", "model=x"), "surgery locate takes the model as an argument"),
        (("bench", "o/m", "o/n", "--set", "bench.random_sites=2"), "surgery bench has no use for bench.random_sites; it uses"),
    ],
)
def test_settings_that_a_verb_does_not_use_are_refused(arguments, line, surgery):
    status, _, error = surgery(*arguments)
    assert status == 2
    assert line in error
    assert len(error.splitlines()) == 1


def test_what_a_verb_uses_exists():
    keys = {row.key for place in sections() for row in rows(place)} | set(sections())
    for verb, used in USED.items():
        assert set(used) <= keys, verb


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["plan.heads=999"], "plan.heads: the model has 32 heads, and 999 are to be grafted"),
        (["plan={kind: layer, layers: 5}"], "plan.layers: the model has 4 layers, and 5 are to be grafted"),
        (["plan.sites=L9.H0"], "the model has no site L9.H0"),
        (["tune.report_to=nope"], "tune.report_to: there is no 'nope'"),
        (["plan={kind: layer, donor: ./nope}"], "no such folder: ./nope"),
        (["plan={kind: layer, donor: checkpoints/tiny-mamba}"], "a mamba model cannot be a donor"),
        (["plan={kind: layer, donor: checkpoints/tiny-llama, donor_layers: {L1: 9}}"], "the donor has no layer 9"),
        (["plan.state_size=16"], "has 16 dimensions; 16 is not 1 to 15"),
        (["model=checkpoints/tiny-llamba", "plan.state_size=2"], "the state of a llamba stays as large as it is"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_locating(settings, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = read_recipe(None, ["model=checkpoints/tiny-mamba2", *settings])
    with pytest.raises(UserError, match=re.escape(line)):
        check_run(recipe, opened(recipe.model))


@pytest.mark.parametrize(
    "plan",
    ["{heads: 32}", "{state_size: 4, blend: 0.1}", "{kind: layer, layers: 4}", "{kind: layer, donor: checkpoints/tiny-llama}"],
)
def test_a_plan_that_can_be_passes(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = read_recipe(None, ["model=checkpoints/tiny-mamba2", f"plan={plan}"])
    check_run(recipe, opened(recipe.model))


@cache
def opened(name):
    return load(name)
