"""A run whose heads and steps are found by measuring: its plan, its report, its estimate, and going on with it."""

import pytest

from surgery import estimate, load
from surgery.choosing import gain as growing
from surgery.choosing.bounded import Measuring
from surgery.costs.counts import planning, plans_measured
from surgery.evaluation import markdown
from surgery.evaluation.automatic import rounds
from surgery.figures.views import page as html
from surgery.jobs import run as job
from surgery.locating.questions import asked
from surgery.locating.subject import Subject
from surgery.records.growth import Saved
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe, changed, read_recipe

RECIPE = """
locate: {options: {pairs: 4}, examples: 8, batch_size: 4, exact: false}
plan:
  heads: auto
  auto: {max_heads: 2, candidates: 2, examples: 6, windows: 2, gates: [0.5, 1.0], skill_examples: 8, steps: 2}
tune:
  steps: auto
  max_steps: 8
  batch_size: 2
  lessons: [{options: {pairs: [2, 4]}, queries: 2}]
  text_batch_size: 1
  text_tokens: 24
bench: {suites: [language], windows: 2, window: 16, batch_size: 4, random_sites: 1}
"""


@pytest.fixture(scope="module")
def recipe(base, tokenizer, tmp_path_factory) -> Recipe:
    folder = tmp_path_factory.mktemp("found")
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "auto.yaml").write_text(f"model: {folder / 'base'}\n{RECIPE}")
    return read_recipe(folder / "auto.yaml")


@pytest.fixture
def every_head_saves(monkeypatch):
    """A random base gains nothing by any graft."""
    saved = Saved(value=1.0, ci95=(0.5, 1.5))
    monkeypatch.setattr(growing._Growing, "_saved", lambda self, before, after, level=0.05: saved)


def test_a_run_finds_its_heads_and_steps(recipe, every_head_saves, tmp_path, monkeypatch, capsys):
    recipe = changed(recipe, data={"skills": []})  # a random base has none, and any graft may cost it text
    report = job.run(recipe, tmp_path / "out", verify="tensors", anyway=True)
    said = capsys.readouterr().err
    plan = Plan.read(tmp_path / "out" / "plan.json")
    assert len(plan.growth.heads()) == 2
    assert plan.growth.measured == 1 + (2 + 1) + (2 + 1)
    assert report.plan.growth == plan.growth
    assert "plan: head 2, " in said
    assert {"plan", "locate", "tune tuned"} <= report.timings.keys()
    steps = report.training["tuned"]["steps"]
    assert 2 <= steps <= 8
    assert {training["steps"] for training in report.training.values()} == {steps}  # the controls', too
    page = markdown.render(report)
    assert f"tune.steps=auto took {steps:.0f} steps; the controls took as many." in page
    assert f"plan.heads=auto added 2 heads ({', '.join(plan.growth.heads())})" in page
    assert "on 6 new questions of kv and 2 windows of text" in page
    assert len(rounds(report)[1]) == 3
    assert "What was found by measuring" in html.render(report)
    # Nothing of the plan is measured again, and the result is the same.
    monkeypatch.setattr(Measuring, "_measure", None)
    again = job.run(recipe, tmp_path / "out", verify="tensors", resume=True)
    assert again.plan == report.plan
    assert "nothing has changed, and everything is finished" in capsys.readouterr().err


def test_what_it_may_cost_is_known_before(recipe):
    base = load(recipe.model)
    assert plans_measured(recipe, 32).plans == 1 + 2 + 2 * 4 + 2 * 3  # the finalists, untrained and after a few steps
    subject = Subject.of(base, verb="plan")
    _, questions_of = asked(base.tokenizer, recipe.locate.probe, recipe.locate.options)
    auto = recipe.plan.auto
    measuring = Measuring.of(
        subject, questions_of(auto.examples, recipe.seed), auto, data=recipe.data, tuning=recipe.tune, taught="kv",
        batch_size=recipe.locate.batch_size, seed=recipe.seed, kept=None,
    )  # fmt: skip
    calls = []
    handle = subject.model.register_forward_pre_hook(lambda *_: calls.append(1))
    measuring.measure([None], "the base")
    handle.remove()
    assert len(measuring.skills) == 2
    assert planning(recipe, base.tokenizer, 32).calls == 17 * len(calls)


@pytest.mark.slow
def test_an_estimate_names_the_plan(recipe):
    cost = estimate(recipe)
    names = [stage.name for stage in cost.stages]
    assert names[:3] == ["locate", "plan", "tune tuned"]
    stages = {stage.name: stage for stage in cost.stages}
    assert stages["plan"].at_most
    assert stages["plan"].work() == "17 plans measured, 6 steps"
    assert stages["tune tuned"].at_most
    assert stages["tune tuned"].counts == {"steps": 8}
    assert any("plan.auto.max_heads" in line for line in cost.assumptions)


def test_the_verb_opens_the_ranked_model(recipe, every_head_saves, surgery, tmp_path):
    folder = recipe.model
    quick = ("--set", "locate.exact=false", "--set", "locate.examples=8")
    assert surgery("locate", folder, "--out", tmp_path / "ranked", *quick)[0] == 0
    few = "examples: 4, windows: 1, candidates: 1, max_heads: 1, gates: [1.0], skill_examples: 4, steps: 1"
    settings = ["--set", "plan.heads=auto", "--set", f"plan.auto={{{few}}}", "--set", "data.skills=[]"]
    ranking = tmp_path / "ranked" / "ranking.json"
    status, _, err = surgery("plan", ranking, *settings)
    assert (status, err) == (2, "surgery: plan.heads=auto measures the ranked model, and there is no base here; give --base\n")
    status, out, err = surgery("plan", ranking, *settings, "--base", folder)
    assert status == 0, err
    assert "attention at L" in out
    assert Plan.read(tmp_path / "ranked" / "plan.json").growth.measured == 2
