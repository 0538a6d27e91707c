"""How a base travels through the verbs: sites as users write them, a dtype that is said once, a base that is found again."""

import json
import shutil

import pytest
import torch

import surgery as package
from surgery.commands.compared import open_compared
from surgery.errors import UserError
from surgery.exporting.source import base_of
from surgery.jobs import opening
from surgery.loading.digests import fingerprint
from surgery.loading.origin import Origin
from surgery.locating.planning import plan as plan_of_ranking
from surgery.locating.ranking import Ranking
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, read_recipe
from surgery.records.site import Site
from surgery.world.tokenizer import build_tokenizer
from tests.models import BASES, VOCABULARY, random_base

TWO = (Site(0, (3, 5)),)
QUICK = (
    "--set", "tune.steps=1", "--set", "tune.batch_size=2", "--set", "tune.text_batch_size=1", "--set", "tune.text_tokens=8",
    "--set", "tune.lessons=[{options: {pairs: 2}}]", "--set", "tune.skill_batch_size=2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sites"),
    [
        ("L0.H3,5", TWO),
        ("[L0.H3, L0.H5]", TWO),
        ('"L0.H3,5"', TWO),
        ("L0.H3, L0.H5", TWO),
        ("[L0.H3,5,L1.H2]", (*TWO, Site(1, (2,)))),
        ("L0.H3,5, L1.H2", (*TWO, Site(1, (2,)))),
    ],
)
def test_sites_as_users_write_them(tmp_path, text, sites):
    (tmp_path / "recipe.yaml").write_text(f"model: x\nplan:\n  sites: {text}\n")
    for recipe in (read_recipe(None, [f"plan.sites={text}"], model="x"), read_recipe(tmp_path / "recipe.yaml")):
        assert Plan(sites=recipe.plan.sites).sites == sites
        dumped = Plan(**recipe.plan.model_dump(include={"sites"}))  # sites as text again
        assert dumped.sites == sites == Plan.model_validate_json(dumped.model_dump_json()).sites


@pytest.mark.parametrize("text", ["5", "[L1,3]", "[L1.H3, true]", "{L1: 3}", "L1.H3,"])
def test_what_is_no_site_is_named(text):
    with pytest.raises(UserError, match=r"is not a site; write L17, L17\.H3 or L36\.H1565,1906"):
        read_recipe(None, [f"plan.sites={text}"], model="x")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a base in float32."""
    folder = tmp_path_factory.mktemp("bases") / "base"
    random_base(vocab_size=VOCABULARY, num_hidden_layers=2).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def done(surgery, *arguments):
    status, out, err = surgery(*arguments)
    assert status == 0, err
    return out


def refused(surgery, *arguments):
    status, _, err = surgery(*arguments)
    assert status == 2
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("family", ["plain", "mamba", "falcon mamba", "llamba"])
def test_the_view_of_a_base_in_another_dtype_is_recognised(tmp_path, family):
    model = BASES[family]()
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    for dtype in ("bfloat16", "float16"):
        assert fingerprint(model, dtype) == package.load(tmp_path, dtype=dtype).fingerprint != fingerprint(model)
    assert fingerprint(model, "auto") == package.load(tmp_path).fingerprint


def test_a_dtype_and_a_tokenizer_are_said_once(surgery, base, tmp_path, monkeypatch):
    """locate says bfloat16 and seed 7: so do the verbs that follow, wherever they run."""
    quick = ("locate.examples=2", "locate.options.pairs=2", "locate.exact=false", "locate.layers=false")
    settings = [part for text in (*quick, "dtype=bfloat16", "seed=7") for part in ("--set", text)]
    done(surgery, "locate", base, *settings, "--out", "located")
    ranking = tmp_path / "located" / "ranking.json"
    assert "attention at L0.H3,5, L1.H2" in done(surgery, "plan", ranking, "--set", "plan.sites=[L0.H3,5,L1.H2]")
    plan = Plan.read(ranking.with_name("plan.json"))
    assert (plan.seed, plan.dtype) == (7, "bfloat16")
    named = plan.provenance.model_copy(update={"recipe": {"tokenizer": "some/words"}})
    assert opening.as_ranked(named, Recipe(model="m")).tokenizer == "some/words"
    assert opening.as_ranked(named, Recipe(model="m", tokenizer="mine")).tokenizer == "mine"
    done(surgery, "plan", ranking, "--set", "seed=8", "--out", "other.json")
    assert Plan.read("other.json").seed == 8
    ranked = Ranking.read(ranking)
    assert plan_of_ranking(ranked, sites="L0.H3,5").sites == plan_of_ranking(ranked, sites=[TWO[0]]).sites == TWO
    assert plan_of_ranking(ranked, sites="L1.H0").seed == 7
    with pytest.raises(UserError, match=r"plan\.sites is empty"):
        plan_of_ranking(ranked, sites=())

    done(surgery, "splice", base, ranking.with_name("plan.json"), "--out", "heads")
    hybrid = package.load("heads")
    assert {p.dtype for p in hybrid.model.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "heads" / "export.json").read_text())["base_unchanged"]
    err = refused(surgery, "splice", base, ranking.with_name("plan.json"), "--out", "x", "--set", "dtype=float32")
    assert "in another dtype" in err
    assert "dtype bfloat16" in err

    # The base of a layer graft is opened again, from another folder, in the plan's dtype.
    monkeypatch.chdir(tmp_path / "located")
    done(surgery, "plan", ranking, "--set", "plan.kind=layer", "--set", "plan.sites=L1", "--out", "layer.json")
    done(surgery, "splice", base, "layer.json", "--out", tmp_path / "layer")
    opened = []

    def load(name, **options):
        opened.append((name, options["dtype"], options["tokenizer"]))
        return package.load(name, **options)

    monkeypatch.setattr(opening, "load", load)
    done(surgery, "tune", "../layer", *QUICK, "--out", "../tuned")
    assert opened == [("../layer", "auto", None), (str(base), "bfloat16", "../layer")]  # a base may hold no tokenizer
    done(surgery, "export", "../tuned", "--format", "patch", "--out", "../patch")
    assert package.load(tmp_path / "patch").model.dtype == torch.bfloat16


def test_models_are_compared_in_one_dtype(surgery, base, tmp_path):
    """A base in float32 and a hybrid in bfloat16 would differ for that alone."""

    package.load(base, dtype="bfloat16").model.save_pretrained(tmp_path / "half")
    build_tokenizer().save_pretrained(tmp_path / "half")
    half = str(tmp_path / "half")
    recipe, first, beside = open_compared(Recipe(model=str(base)), [half, str(base)])
    dtypes = [found.model.dtype for found in (first, *beside.values())]
    assert (recipe.dtype, dtypes) == ("bfloat16", [torch.bfloat16] * 3)
    recipe, first, beside = open_compared(Recipe(model=str(base)), [str(base)])
    assert (recipe.dtype, first.model.dtype) == ("auto", torch.float32)
    told = Recipe(model=str(base), dtype="auto")
    assert {found.model.dtype for found in open_compared(told, [half])[2].values()} == {torch.bfloat16}
    assert open_compared(told, [half])[1].model.dtype == torch.float32


def test_a_hybrid_finds_its_base_from_any_folder(surgery, base, tmp_path, monkeypatch):
    """As a place seen from the hybrid's own folder: both can be moved, and no absolute path stands in the record."""
    (tmp_path / "work").mkdir()
    shutil.copytree(base, tmp_path / "work" / "base")
    monkeypatch.chdir(tmp_path / "work")
    Plan(kind="layer", sites=("L1",)).write("plan.json")
    for name in ("base", tmp_path / "work" / "base"):
        done(surgery, "splice", name, "plan.json", "--out", "made/hybrid", "--overwrite")
        record = (tmp_path / "work" / "made" / "hybrid" / "export.json").read_text()
        assert json.loads(record)["base"]["name"] == "base"
        assert str(tmp_path) not in record
    monkeypatch.chdir(tmp_path)
    shutil.move("work", "moved")
    for start, hybrid in (("moved/made/hybrid", "."), ("moved/made", "hybrid"), (".", "moved/made/hybrid")):
        monkeypatch.chdir(tmp_path / start)
        assert base_of(hybrid) == str(tmp_path / "moved" / "base")
    monkeypatch.chdir(tmp_path)
    done(surgery, "tune", "moved/made/hybrid", *QUICK, "--out", "tuned")
    assert json.loads((tmp_path / "tuned" / "export.json").read_text())["base"]["name"] == "base"
    done(surgery, "export", "tuned", "--format", "patch", "--out", "deep/er/patch")
    monkeypatch.chdir(tmp_path / "deep")
    expected = package.load(tmp_path / "tuned").model.backbone.layers[1].mixer.graft.q_proj.weight
    assert torch.equal(package.load("er/patch").model.backbone.layers[1].mixer.graft.q_proj.weight, expected)

    shutil.move(tmp_path / "moved" / "base", tmp_path / "elsewhere")
    for arguments in (("tune", "../tuned", *QUICK), ("export", "../tuned", "--format", "patch"), ("export", "er/patch")):
        assert "say where" in (err := refused(surgery, *arguments, "--out", "x"))
        assert "(--base)" in err
    done(surgery, "tune", "../tuned", *QUICK, "--base", tmp_path / "elsewhere", "--out", "again")


def test_records_of_earlier_versions_name_a_place_seen_from_where_they_ran(tmp_path, monkeypatch):
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    origin = Origin(name="base", hub=False, revision=None, licence={})
    assert origin.place(tmp_path / "hybrid") == "base"
    (tmp_path / "hybrid" / "base").mkdir()
    assert origin.place(tmp_path / "hybrid") == str(tmp_path / "hybrid" / "base")
    assert origin.model_copy(update={"hub": True, "name": "a/b"}).place(tmp_path) == "a/b"
