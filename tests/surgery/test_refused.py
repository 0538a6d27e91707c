"""A job that is refused before it has measured anything leaves nothing behind; what was measured stays."""

import shutil

import pytest
import torch

from surgery.commands.comparison import compare
from surgery.commands.tune_hybrid import tune_hybrid
from surgery.errors import UserError
from surgery.exporting.export import export
from surgery.jobs.locating_stage import locate_model
from surgery.jobs.output_folder import begin, withdrawn_if_refused
from surgery.jobs.run import run
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.record import write_text
from surgery.splicing.splice import splice
from tests.models import VOCABULARY, names, random_base

RECIPE = Recipe(
    model="base",
    locate={"exact": False, "examples": 4, "options": {"pairs": 3}},
    tune={"steps": 2, "batch_size": 2, "text_batch_size": 1, "text_tokens": 16, "lessons": [{"options": {"pairs": 2}}]},
    bench={"suites": ["quick"], "pairs": [3], "limit": 4, "windows": 2, "window": 32, "contexts": [16]},
)


def job(*folders, then=None, **options):
    """Begins in folders, then does something more, then is refused."""

    @withdrawn_if_refused
    def refused():
        for folder in folders:
            begin(folder, "tune", RECIPE, **options)
        if then:
            then()
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        refused()


def test_what_was_begun_is_withdrawn(tmp_path):
    (tmp_path / "empty").mkdir()
    job(tmp_path / "new" / "below" / "out", tmp_path / "empty")
    assert names(tmp_path) == ["empty"], "a folder that was there stays"
    job(tmp_path / "out", then=lambda: write_text(tmp_path / "out" / "tuning.json", "{}"))
    assert names(tmp_path) == ["empty"]
    job(tmp_path / "out", then=lambda: (tmp_path / "out" / "mine").mkdir(parents=True))
    assert names(tmp_path) == ["empty", "out", "out/mine"], "what somebody else put there meanwhile stays"


def test_what_was_measured_or_was_there_stays(tmp_path):
    out = tmp_path / "out"
    job(out, then=lambda: write_text(out / "ranking.json", "{}"))
    kept = names(tmp_path)
    assert kept == ["out", "out/ranking.json", "out/recipe.yaml", "out/run.json"]
    job(out, resume=True)
    assert names(tmp_path) == kept
    (tmp_path / "out" / "ranking.json").unlink()
    job(out, overwrite=True)
    assert names(tmp_path) == ["out", "out/recipe.yaml", "out/run.json"], "an earlier run's folder stays one"


def test_an_interrupted_job_is_none_that_was_refused(tmp_path):
    @withdrawn_if_refused
    def interrupted():
        begin(tmp_path / "out", "tune", RECIPE)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == ["out", "out/recipe.yaml", "out/run.json"]


@pytest.fixture(scope="module")
def overflowing(tokenizer, tmp_path_factory):
    """A base whose weights are finite and whose states are not, and a hybrid of it."""
    folder = tmp_path_factory.mktemp("overflowing")
    base = random_base(vocab_size=VOCABULARY)
    with torch.no_grad():
        base.backbone.layers[0].mixer.in_proj.weight.fill_(3e38)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    plan = Plan(sites=("L1.H3",))
    export(splice(base, plan), folder / "hybrid", tokenizer=tokenizer, plan=plan, base=str(folder / "base"), verify="tensors")
    return folder


@pytest.mark.parametrize("verb", ["locate", "tune", "bench", "run"])
def test_states_that_overflow(overflowing, tmp_path, verb):
    """It shows in the first forward pass, after the folder was made ready."""
    base, hybrid, out = overflowing / "base", overflowing / "hybrid", tmp_path / "out"
    recipe = RECIPE.model_copy(update={"model": str(hybrid if verb == "tune" else base)})
    jobs = {
        "locate": lambda: locate_model(recipe, out), "tune": lambda: tune_hybrid(recipe, out),
        "bench": lambda: compare(recipe, [str(hybrid)], out), "run": lambda: run(recipe, out),
    }  # fmt: skip
    with pytest.raises(UserError, match=r"are not finite|overflows in torch.float32"):
        jobs[verb]()
    assert names(tmp_path) == []


def test_the_job_of_an_empty_folder_that_is_gone(tmp_path):
    job(tmp_path / "out", then=lambda: shutil.rmtree(tmp_path / "out"))
    assert names(tmp_path) == []
