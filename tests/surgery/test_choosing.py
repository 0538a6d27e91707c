"""plan.by: choice. The heads of a plan are those that a perfect choice would help most."""

import json

import pytest

from surgery.choosing.task import ChoiceTask
from surgery.errors import UserError
from surgery.locating.locate import locate
from surgery.more.oracles import Oracles
from surgery.more.ways.choice import choose, most
from surgery.records.plan import Plan
from surgery.records.recipe import Auto, Data, PlanOptions
from tests.models import TINY

NO_SKILLS = Data(skills=())  # test_skills.py has the bounds
FEW = PlanOptions(heads=2, by="choice", auto=Auto(examples=8, candidates=2, windows=2))
NO_GAIN = "auto: {least_gain: 99, examples: 4, skill_examples: 4, windows: 2, candidates: 1, max_heads: 1}"


@pytest.fixture(scope="module")
def ranking(tiny):
    return locate(tiny, options={"pairs": 16}, examples=8, exact=False, seed=1)


def test_a_plan_by_choice(tiny, ranking, tmp_path, monkeypatch):
    """As many heads as are wanted, where the built-in model retrieves; measured once, and no more often than was said."""
    measured, own = [], Oracles.outcome

    def outcome(self, carriers=(), **options):
        measured.append(carriers)
        return own(self, carriers, **options)

    monkeypatch.setattr(Oracles, "outcome", outcome)
    chosen = choose(ChoiceTask.of(tiny, ranking, FEW, data=NO_SKILLS, kept=tmp_path))
    assert 1 < len(measured) <= most(FEW, 32, bounded=False).asked
    assert 1 <= sum(len(site.heads) for site in chosen.sites) <= 2
    assert {site.layer for site in chosen.sites} == {0}
    assert {head for site in chosen.sites for head in map(str, site.each())} == {*chosen.starts} == {*chosen.places}
    assert chosen.provenance == ranking.provenance
    monkeypatch.setattr(Oracles, "outcome", None)
    assert choose(ChoiceTask.of(tiny, ranking, FEW, data=NO_SKILLS, kept=tmp_path)) == chosen


def test_auto_adds_heads_while_they_are_worth_it(tiny, ranking):
    """A perfect choice at the best head leaves no hundredth of a nat to save."""

    def chosen(heads, **auto):
        auto = FEW.auto.model_copy(update={"max_heads": 3, **auto})
        return {
            *choose(ChoiceTask.of(tiny, ranking, FEW.model_copy(update={"heads": heads, "auto": auto}), data=NO_SKILLS)).places
        }

    best = chosen(1)
    assert len(best) == 1
    assert chosen("auto", least_gain=0.01) == best
    assert best <= chosen("auto", least_gain=0.0)


def test_as_a_setting(surgery, tmp_path, ranking):
    ranking.write(tmp_path / "ranking.json")
    few = ("--set", "plan.auto={examples: 4, candidates: 1, windows: 2}", "--set", "plan.blend=0.5", "--set", "data.skills=[]")
    status, out, error = surgery("plan", "ranking.json", "--set", "plan.by=choice", *few, "--base", TINY)
    assert status == 0, error
    chosen = Plan.read(tmp_path / "plan.json")
    assert chosen.blend == 0.5
    assert str(chosen.sites[0]) in out
    for settings, complaint in {
        "plan={by: choice, sites: L0.H1}": "plan.by: choice finds heads (plan.heads) of kind head",
        "plan={by: choice, kind: layer}": "plan.by: choice finds heads (plan.heads) of kind head",
        f"plan={{by: choice, heads: auto, {NO_GAIN}}}": "plan.by=choice: at no head does a perfect choice save 99 nats",
    }.items():
        status, _, error = surgery("plan", "ranking.json", "--set", settings, "--base", TINY)
        assert (status, complaint in " ".join(error.split())) == (2, True), error
    status, _, error = surgery("plan", "ranking.json", "--set", "plan.by=choice", "--base", "nowhere")
    assert (status, "plan.by=choice measures the ranked model, and there is no nowhere here" in error) == (2, True), error


def test_a_probe_without_spans_is_refused(tiny, ranking):
    letters = ranking.model_copy(update={"probe": json.loads(json.dumps(ranking.probe)) | {"name": "knowledge", "options": {}}})
    with pytest.raises(UserError, match="with the positions of answers"):
        choose(ChoiceTask.of(tiny, letters, FEW, data=NO_SKILLS))
