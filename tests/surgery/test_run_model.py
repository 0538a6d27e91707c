"""`surgery run MODEL`: the recipe that is chosen for a model, and what is declined."""

import shutil
from pathlib import Path

import pytest
import yaml

from surgery.choosing.gain import NoGain
from surgery.commands import run_model
from surgery.commands.look import ModelLook, look
from surgery.commands.run_model import chosen_for, run_chosen
from surgery.evaluation.report import Report
from surgery.loading.hub import is_model
from surgery.records.recipe import read_recipe
from surgery.world.tokenizer import build_tokenizer
from tests.models import TINY, VOCABULARY, names, random_base

SMALL = (
    "locate.examples=8", "locate.exact=false", "plan={by: gain, heads: 1}",
    "tune={steps: 1, batch_size: 2, text_batch_size: 1, skill_batch_size: 2}",
    "bench={pairs: [4], limit: 4, windows: 2, window: 16, contexts: [], controls: [tuned]}",
)  # fmt: skip


@pytest.fixture(scope="module")
def seen():
    """A look at the built-in model, of few questions."""
    import surgery as package

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surgery.commands.look.MOST", 40)
        return look(package.load(str(TINY)))


@pytest.fixture(autouse=True)
def looked(seen, monkeypatch):
    """Nothing is asked again."""
    monkeypatch.setattr(run_model, "look", lambda *_, **__: seen)


def test_what_is_a_model(tmp_path):
    assert is_model(str(TINY))
    assert is_model("state-spaces/mamba2-130m")
    assert not is_model("nobody/recipe.yaml")
    assert not is_model(str(tmp_path / "no.yaml"))


def test_every_choice_is_a_line_with_its_reason(tmp_path):
    """And what is set goes before it; the file gives the same recipe."""
    chosen = chosen_for(str(TINY), tmp_path / "out", settings=("tune.max_steps=7", "bench.seeds=2", "seed=5"))
    (tmp_path / "chosen.yaml").write_text(chosen.text())
    assert read_recipe(tmp_path / "chosen.yaml") == chosen.recipe
    assert (chosen.recipe.tune.max_steps, chosen.recipe.bench.seeds, chosen.recipe.seed) == (7, 2, 5)
    lines = chosen.text().splitlines()
    assert "  options: {pairs: 32}  # of the sizes asked, answered nearest to half: " in "\n".join(lines)
    assert {"  max_steps: 7  # by --set", "  seeds: 2  # by --set", "seed: 5  # by --set"} <= {*lines}
    assert names(tmp_path) == ["chosen.yaml"]


def test_a_text_is_divided(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("\n\n".join(f"Paragraph {n}, of some words." for n in range(100)))
    chosen = chosen_for(str(TINY), tmp_path / "out", text=text)
    train, held_out = (
        Path(name).read_text() for name in (chosen.recipe.data.train_text[0].source, chosen.recipe.data.held_out_text)
    )
    assert train + held_out == text.read_text()
    assert train.endswith("\n\n")
    text.write_text("Other words.\n" * 200)
    again = chosen_for(str(TINY), tmp_path / "out", text=text)  # another text takes its place
    assert "Other words." in Path(again.recipe.data.held_out_text).read_text()
    assert 0.08 < len(held_out) / len(train) < 0.2


def test_the_built_in_world_is_no_default_for_another_model(surgery, seen, tmp_path, monkeypatch):
    monkeypatch.setattr(run_model, "look", lambda *_, **__: seen.model_copy(update={"facts": "capitals"}))
    status, _, err = surgery("run", TINY, "--out", "out")
    assert (status, "--text FILE" in err, names(tmp_path)) == (2, True, []), err


def test_a_model_that_does_not_retrieve_is_declined(surgery, tmp_path, monkeypatch):
    monkeypatch.setattr(run_model, "look", look)
    monkeypatch.setattr("surgery.commands.look.MOST", 32)
    random_base(vocab_size=VOCABULARY).save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    before = names(tmp_path)
    status, out, err = surgery("run", "base", "--out", "out")
    assert (status, names(tmp_path)) == (1, before), err
    assert "Verdict: not worth editing, because it does not retrieve" in out
    assert chosen_for("base", tmp_path / "out").declined
    chosen = chosen_for("base", tmp_path / "out", anyway=True)
    assert not chosen.declined
    assert chosen.recipe.locate.options == {"pairs": 4}


def test_a_run_writes_what_it_followed(surgery, tmp_path):
    shutil.copytree(TINY, tmp_path / "mine")
    settings = [part for setting in SMALL for part in ("--set", setting)]
    status, out, err = surgery("run", "mine", *settings)
    assert status == 0, err
    done = tmp_path / "runs" / "mine"
    assert ModelLook.read(done / "look.json").worth
    assert "Verdict: worth trying" in out
    assert read_recipe(done / "chosen.yaml") == read_recipe(done / "recipe.yaml")
    assert "Did it help?" in out
    status, _, err = surgery("bench", "mine", done / "hybrid", "--set", SMALL[-1])
    assert (status, f"taken from {done / 'tuning' / 'control_tuned'}" in err) == (0, True), err  # and not tuned again
    assert "control_tuned: 1/" not in err
    reports = (Report.read(place / "report.json") for place in (done, tmp_path / "runs" / "bench-hybrid"))
    assert len({report["control_tuned"].conditions.model for report in reports}) == 1
    status, _, err = surgery("run", "mine", "--resume")
    assert (status, "nothing has changed, and everything is finished" in err) == (0, True), err
    assert Report.read(done / "report.json").provenance.recipe["plan"]["heads"] == 1


def test_where_no_head_gains_untrained_choice_takes_over(tmp_path, monkeypatch):
    chosen = chosen_for(str(TINY), tmp_path / "out")
    runs = []

    def run(recipe, out, *, resume, papers, **options):
        runs.append((recipe, resume, papers["chosen.yaml"]))
        if len(runs) == 1:
            raise NoGain("no head is worth its cache")

    monkeypatch.setattr(run_model, "run", run)
    run_chosen(chosen, tmp_path / "out", verify="auto", overwrite=True)
    (first, *_), (second, resumed, text) = runs
    assert (first.plan.by, first.tune.hints, first.tune.lora) == ("gain", None, None)
    assert (second.plan.by, second.tune.hints.weight, second.tune.lora.target_modules) == (
        "choice",
        0.3,
        ("in_proj", "out_proj"),
    )
    assert resumed  # what was located is kept
    runs.clear()
    channels = chosen_for(str(TINY.parent / "tiny-mamba"), tmp_path / "channels")
    run_chosen(channels, tmp_path / "channels", verify="auto", overwrite=True)
    assert [(each.plan.by, each.plan.heads) for each, *_ in runs] == [("gain", "auto"), ("attribution", 48)]
    assert runs[1][0].tune == runs[0][0].tune
    runs.clear()
    settled = chosen_for(str(TINY.parent / "tiny-mamba"), tmp_path / "channels", settings=["plan.heads=4"])
    with pytest.raises(NoGain):
        run_chosen(settled, tmp_path / "channels", verify="auto", overwrite=True)
    assert yaml.safe_load(text)["plan"]["by"] == "choice"
    assert second.locate == first.locate
