"""The ways of choosing heads (plan.by): found by listing, with one interface, and each with the heads that its rule says."""

import numpy as np
import pytest
import torch

import surgery
from surgery import choosing
from surgery.choosing import check_way, names, way_of
from surgery.choosing.bounded import Measuring, PlanMeasurement
from surgery.choosing.task import ChoiceTask
from surgery.errors import UserError
from surgery.locating.locate import locate
from surgery.locating.subject import Subject
from surgery.more.ways.halving import FEWEST
from surgery.records.plan import Plan
from surgery.records.recipe import Auto, Data, PlanOptions
from surgery.statistics import Estimate
from surgery.studies import Findings
from surgery.studies import ways as ways_study
from surgery.studies.passes import PassCounter
from surgery.studies.study import Row
from tests.models import ROOT, TINY

AUTO = Auto(examples=8, windows=2, candidates=2, max_heads=2, steps=8, finalists=1, skill_examples=8)
RULES = ("ablation", "attribution", "last", "layer", "random", "uniform")


@pytest.fixture(scope="module")
def ranking(tiny):
    return locate(tiny, options={"pairs": 16}, examples=8, exact=True, layers=False, seed=1)


def task(tiny, ranking, by, heads=2, **fields) -> ChoiceTask:
    options = PlanOptions(by=by, heads=heads, blend=0.25, auto=AUTO)
    return ChoiceTask.of(tiny, ranking, options, **{"data": Data(skills=())} | fields)


def heads(plan: Plan) -> list[str]:
    return [str(head) for site in plan.sites for head in site.each()]


def made(monkeypatch, saves) -> list[tuple[tuple[str, ...], int]]:
    """Measurements that are made up. saves: (heads, steps) -> nats. Returns what was measured."""
    asked = []

    def measure(self, plans, description, steps=0):
        asked.extend((() if plan is None else tuple(heads(plan)), steps) for plan in plans)
        self.count += len(plans)
        losses = [5 - (0 if plan is None else saves(heads(plan), steps)) + np.arange(8) / 100 for plan in plans]
        return [PlanMeasurement(loss, loss < 4, np.ones(2), 0.5) for loss in losses]

    monkeypatch.setattr(Measuring, "measure", measure)
    return asked


def test_a_way_is_a_file_that_says_what_it_does():
    assert names()[0] == "gain"
    assert {*RULES, "choice", "gates", "halving", "marginal"} < {*names()}
    for name in names():
        assert way_of(name).__doc__
        assert all(hasattr(way_of(name), part) for part in ("choose", "most"))
    with pytest.raises(UserError, match=r"plan\.by: no way of choosing is named 'halfing'; did you mean halving\?"):
        check_way("halfing")


@pytest.mark.parametrize("by", RULES)
def test_a_rule_takes_the_heads_that_it_says(tiny, ranking, by):
    chosen = task(tiny, ranking, by)
    plan = way_of(by).choose(chosen)
    assert (len(heads(plan)), plan.blend) == (2, 0.25)
    scores = {str(score.site): score for score in ranking.heads}
    if by in ("ablation", "attribution"):
        name = "ablation_loss" if by == "ablation" else by
        order = sorted(scores, key=lambda head: -getattr(scores[head], name).value)
        assert {*heads(plan)} == {*order[:2]}
    layers = [site.layer for site in plan.sites for _ in site.each()]
    assert by != "last" or layers == [3, 3]
    assert by != "uniform" or layers == [1, 3]
    assert by != "layer" or layers == [ranking.heads[0].site.layer] * 2
    assert by != "random" or way_of(by).choose(task(tiny, ranking, by, seed=3)).sites != plan.sites
    assert plan.starts == surgery.plan(ranking, sites=plan.sites).starts  # what locate found best for each head
    assert way_of(by).most(chosen.options, 32, bounded=False).plans == 0 == chosen.measuring.count


def test_eight_heads_are_spread_over_four_layers(tiny, ranking):
    plan = way_of("uniform").choose(task(tiny, ranking, "uniform", heads=8))
    assert sorted(site.layer for site in plan.sites for _ in site.each()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_passes_are_counted_in_sequences_through_all_layers(tiny, ranking):
    """A hybrid's forward counts as its base's. Only what learns is gone back through."""
    counter = PassCounter(Subject.of(tiny))
    ids = torch.zeros(3, 5, dtype=torch.long)
    with counter.counted():
        surgery.adopt(tiny.model)(input_ids=ids)
    assert (counter.passes().forwards, counter.passes().backwards) == (3, 0)
    hybrid = surgery.splice(tiny, surgery.plan(ranking, sites="L2.H1"))
    with counter.counted():
        hybrid(input_ids=ids).logits.sum().backward()
    assert (counter.passes().forwards, counter.passes().backwards) == (6, 1.5)  # through two of four layers
    hybrid(input_ids=ids)
    assert counter.passes().forwards == 6


STUDY = """
model: checkpoints/tiny-deltanet
data: {skills: []}
locate: {examples: 4, layers: false, options: {pairs: 8}}
tune: {steps: 3}
bench: {pairs: [8], limit: 8, windows: 2}
study: {name: ways, heads: [1, 2], ways: [uniform, gain, layer], bases: {tiny-deltanet: {}}, draws: {layer: 2}}
"""


@pytest.mark.slow  # a whole study
def test_the_study_compares_ways_after_the_same_tuning(surgery, tmp_path, monkeypatch):
    """Made-up results: what each plan saves is known. Nothing is chosen twice."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "ways.yaml").write_text(STUDY)

    def measure(self, plans, description, steps=0):
        assert all(steps == (0 if plan is None else 3) for plan in plans)
        gains = [0 if plan is None else 4 * (plan.sites[0].layer == 0) for plan in plans]
        right = [np.arange(8) < 2 + gain for gain in gains]
        return [PlanMeasurement(5.0 - each, each, np.ones(2), 0.5, dict.fromkeys(self.skills, each)) for each in right]

    monkeypatch.setattr(Measuring, "measure", measure)
    status, printed, error = surgery("run", "ways.yaml", "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    about, rows = findings.about["tiny-deltanet"], {row.what: row.figures for row in findings.rows}
    ways = ("gain", "uniform", "layer")
    assert [*rows] == ["tiny-deltanet: base", *(f"tiny-deltanet: {way}, {n} heads" for way in ways for n in (2, 1))]
    assert rows["tiny-deltanet: base"]["unseen keys"].accuracy == 0.25
    for way in ways:
        for count, chosen in about["sites"][way].items():
            assert len(chosen) == (2 if way == "layer" else 1)
            wanted = np.mean([0.5 * (sites[0].startswith("L0")) for sites in chosen])
            assert rows[f"tiny-deltanet: {way}, {count} heads"]["unseen keys, change"].value == wanted
    assert "unseen keys, against gain" in rows["tiny-deltanet: layer, 1 heads"]
    assert "unseen keys, against gain" not in rows["tiny-deltanet: gain, 1 heads"]
    assert about["cost"]["gain"]["forwards"] > about["cost"]["uniform"]["forwards"] > 0  # all heads by themselves
    assert ways_study.agreement(findings.about, "gain", "gain") == (1, 1)
    assert "gain: unseen keys" in printed.replace("\n", " ")
    monkeypatch.setattr(ways_study, "planned", None)
    (tmp_path / "out" / "findings.json").unlink()
    assert surgery("run", "ways.yaml", "--out", "out", "--resume")[0] == 0
    again = Findings.read(tmp_path / "out" / "findings.json")
    assert (again.rows, again.about) == (findings.rows, findings.about)
    for setting, complaint in [
        ("tune.steps=auto", "set tune.steps to a number (study.bases.tiny-deltanet)"),
        ("data.skills=auto", "which nothing bounds: data.skills=[]"),
        ("study.ways=[gian]", "no way of choosing is named 'gian'"),
        ("study.bases.tiny-deltanet={plan: {hedas: 2}}", "unknown key 'plan.hedas'"),
        ("study.bases.tiny-deltanet={heads: 2}", "numbers of heads, such as [1, 2, 4]"),
    ]:
        status, _, error = surgery("run", "ways.yaml", "--set", setting, "--out", "other")
        assert (status, complaint in error, (tmp_path / "other").exists()) == (2, True, False), error


PROSE = """
model: checkpoints/tiny-deltanet
data: {skills: [], train_text: a.txt, held_out_text: a.txt}
locate: {probe: hits, examples: 4, layers: false, options: {source: a.txt, tokens: 64, rare: 5000}}
tune: {steps: 3, lessons: [], hit_weight: 1.0, text_tokens: 32}
bench: {limit: 4, windows: 2, window: 64}
study: {name: ways, heads: [1], ways: [gain, layer, random], seeds: 2, draws: {layer: 1, random: 2},
        bases: {tiny-deltanet: {texts: [b.txt, c.txt]}}}
"""


def test_on_prose_a_text_is_a_unit_and_each_draw_has_a_seed_of_its_own(surgery, tmp_path, monkeypatch):
    """Made-up losses: with a graft each hit costs 1 nat less in one text, 3 in the other, with the second seed 2 more."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "prose.yaml").write_text(PROSE)
    rng = np.random.default_rng(0)
    for name in "abc":
        words = [" ".join(rng.choice(["lake", "moon", "gate", "bell", "kite", "oven", "sand", "leaf"], 6)) for _ in range(200)]
        (tmp_path / f"{name}.txt").write_text("\n".join(words))

    def measure(self, plans, description, steps=0):
        hits, weight = np.array([len(row.hits) for row in self.questions]), np.array([row.weight for row in self.questions])
        first = np.arange(len(hits)) < 4  # rows of b.txt
        saved = [0 if plan is None else np.where(first, 1, 3) + 2 * self.seed for plan in plans]
        return [PlanMeasurement((9 - each) * hits * weight, hits > 0, np.ones(2), 0.5, {}) for each in saved]

    monkeypatch.setattr(Measuring, "measure", measure)
    status, printed, error = surgery("run", "prose.yaml", "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    rows = {row.what: row.figures for row in findings.rows}
    assert rows["tiny-deltanet: base"]["loss on recall hits"].value == pytest.approx(9)
    saved = rows["tiny-deltanet: gain, 1 heads"]["nats saved on recall hits"]
    assert (saved.value, saved.n) == (pytest.approx(3), 2)  # of 1 and 3, and of 3 and 5
    assert saved.ci95[0] < 0  # two texts say little of others
    assert rows["tiny-deltanet: random, 1 heads"]["nats saved on recall hits, against gain"].value == pytest.approx(0)
    assert np.array(findings.about["tiny-deltanet"]["gains"]["random"]["1"]) == pytest.approx(np.array([[2], [4]]))
    assert np.array(findings.about["tiny-deltanet"]["gains"]["gain"]["1"]) == pytest.approx(np.array([[2, 4]]))
    assert "gain: nats saved on recall hits" in printed.replace("\n", " ")
    for setting, complaint in [
        ("study.bases.tiny-deltanet.texts=[b.txt]", "texts: two files or more where locate.probe is hits"),
        ("locate={probe: kv, options: {pairs: 8}}", "texts: two files or more where locate.probe is hits"),
        ("study.ways=null", "'choice' needs a probe that says where answers are"),
    ]:
        status, _, error = surgery("run", "prose.yaml", "--set", setting, "--out", "other")
        assert (status, complaint in error) == (2, True), error


def test_beside_the_default_an_interval_and_every_seed_decide():
    def row(way, low, high):
        figures = {"unseen keys, change": Estimate(value=0.1, ci95=(0, 1), n=9)}
        figures |= (
            {"unseen keys, against gain": Estimate(value=(low + high) / 2, ci95=(low, high), n=9)} if way != "gain" else {}
        )
        return Row(what=f"tiny: {way}, 2 heads", figures=figures)

    def about(**gains):
        return {"tiny": {"gains": {way: {"2": [of]} for way, of in gains.items()}}}

    beside = ways_study.beside_default
    assert beside(about(gain=[0.1, 0.2], last=[0.3, 0.4]), row("last", 0.1, 0.3)) == 1
    assert beside(about(gain=[0.1, 0.2], last=[0.5, 0.2]), row("last", 0.1, 0.3)) == 0  # the second seed says nothing
    assert beside(about(gain=[0.1, 0.2], last=[0.0, 0.1]), row("last", -0.2, -0.1)) == -1
    assert beside(about(gain=[0.1, 0.2], last=[0.0, 0.1]), row("last", -0.2, 0.1)) == 0
    assert beside(about(gain=[0.1, 0.2]), row("gain", 0, 0)) is None


def test_joint_gates_open_where_a_graft_gains(tiny, ranking, monkeypatch):
    monkeypatch.setattr(way_of("gates"), "STEPS", 4)
    before = [(p.requires_grad, p.grad is None) for p in tiny.model.parameters()]
    plan = way_of("gates").choose(task(tiny, ranking, "gates"))
    assert {site.layer for site in plan.sites} == {0}
    assert [(p.requires_grad, p.grad is None) for p in tiny.model.parameters()] == before


def test_marginal_gains_are_of_heads_that_were_tuned_alone(tiny, ranking, monkeypatch):
    asked = made(monkeypatch, lambda of, steps: {"L2.H1": 2.0, "L1.H0": 1.0}.get(of[0], 0.0) * (steps == AUTO.steps))
    plan = way_of("marginal").choose(task(tiny, ranking, "marginal"))
    assert {*heads(plan)} == {"L2.H1", "L1.H0"}
    assert len([each for each in asked if each[1]]) == 32
    assert len(asked) <= way_of("marginal").most(PlanOptions(by="marginal", heads=2, auto=AUTO), 32, bounded=True).plans


def test_halving_keeps_what_tuning_makes_good(tiny, ranking, monkeypatch):
    """The heads of layer 2 gain nothing untrained, and most after a few steps."""
    asked = made(monkeypatch, lambda of, steps: steps * 0.1 if of[0].startswith("L2") else 0.2)
    chosen = task(tiny, ranking, "halving")
    plan = way_of("halving").choose(chosen)
    assert {site.layer for site in plan.sites} == {2}
    plans = [each for each in asked if each[1] == FEWEST]
    assert len(plans) == len({*plans}) == 4  # each layer alone, of which one leads in all; one gate
    assert len(asked) <= way_of("halving").most(chosen.options, 32, bounded=True).plans


def test_every_way_stays_within_the_bounds(tiny, ranking, monkeypatch):
    """Untrained and tuned: what a rule proposes is measured under each gate, and the largest that costs no skill is taken."""
    measured = Measuring._measure

    def costs(self, chosen, steps=0):
        got = measured(self, chosen)
        large = chosen is not None and (chosen.blend is None or chosen.blend > 0.3)
        skills = {name: np.full_like(right, not large) for name, right in got.skills.items()}
        return PlanMeasurement(got.loss, got.correct, np.ones_like(got.text), got.seconds, skills)

    monkeypatch.setattr(Measuring, "_measure", costs)
    options = PlanOptions(by="last", heads=2, auto=AUTO.model_copy(update={"skill_examples": 200}))
    chosen = ChoiceTask.of(tiny, ranking, options, data=Data(skills=("knowledge",)))
    plan = way_of("last").choose(chosen)
    assert plan.growth is not None
    assert (plan.blend, plan.growth.candidates[0].beyond) == (0.25, ("knowledge",))
    assert chosen.measuring.count <= choosing.way_of("last").most(options, 32, bounded=True).plans


def test_as_a_setting(surgery, tmp_path, ranking):
    ranking.write(tmp_path / "ranking.json")
    status, out, error = surgery(
        "plan", "ranking.json", "--set", "plan.by=last", "--set", "plan.blend=0.5", "--set", "data.skills=[]", "--base", TINY
    )
    assert status == 0, error
    assert out.startswith("attention at L3.H")
    for setting, line in [
        ("plan.by=furthest", "plan.by: no way of choosing is named 'furthest'"),
        ("plan={by: last, sites: [L0.H1]}", "by: last finds heads"),
    ]:
        status, _, error = surgery("plan", "ranking.json", "--set", setting, "--base", TINY)
        assert (status, error.count("\n")) == (2, 1)
        assert line in error
