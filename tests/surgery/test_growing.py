"""plan.heads: auto adds heads by measured gain, on questions that ranked none, and stops where the next is not worth it."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MambaConfig, MambaForCausalLM

import surgery
from surgery.choosing import gain as growing
from surgery.choosing.bounded import Measuring, PlanMeasurement
from surgery.choosing.gain import grow, most
from surgery.choosing.task import CHANNELS, ChoiceTask
from surgery.errors import UserError
from surgery.locating.locate import locate
from surgery.locating.planning import plan
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import answer
from surgery.records.growth import Saved
from surgery.records.recipe import Auto, Data, PlanOptions, read_recipe
from surgery.records.site import Site
from surgery.splicing.splice import install
from tests.models import random_selective

NO_SKILLS = Data(skills=())  # test_skills.py has the bounds
FEW = {"examples": 12, "windows": 2, "candidates": 2, "max_heads": 3}


def options(**changes) -> PlanOptions:
    return PlanOptions(heads="auto", auto=Auto(**FEW | changes))


@pytest.fixture(scope="module")
def ranking(base, tokenizer) -> Ranking:
    return locate(base, tokenizer, options={"pairs": 4}, examples=8, exact=False, seed=1)


class Made:
    """Measurements that are made up: how much each head saves on every question, and what it costs the text under a gate."""

    def __init__(self, saves: dict[str, float], cost: float = 0.0, n: int = 40):
        self.saves, self.cost, self.n, self.asked = saves, cost, n, []

    def __call__(self, chosen):
        self.asked.append(chosen)
        noise = np.random.default_rng(0).normal(size=self.n)  # of the questions, the same for every plan
        heads = [str(head) for site in chosen.sites for head in site.each()] if chosen else []
        blend = 1.0 if chosen is None or chosen.blend is None else chosen.blend
        loss = 5 + noise - sum(self.saves.get(head, 0.0) * blend**0.5 for head in heads) * (1 + 0.1 * noise)
        text = np.linspace(1, 2, 8) + self.cost * blend**2 * len(heads)
        return PlanMeasurement(loss, loss < 4, text, 0.5)


def made(monkeypatch, *arguments, **settings) -> Made:
    measurements = Made(*arguments, **settings)
    monkeypatch.setattr(Measuring, "_measure", lambda _, chosen: measurements(chosen))
    return measurements


def leading(ranking, count) -> list[str]:
    return [str(ranking.columns.site(i)) for i in range(count)]


def test_heads_are_added_while_they_save_enough(base, tokenizer, ranking, monkeypatch):
    first, second, third, fourth = leading(ranking, 4)
    measurements = made(monkeypatch, {second: 0.5, third: 0.3, first: 0.01, fourth: 0.005})
    found = grow(base, ranking, options(), tokenizer=tokenizer, data=NO_SKILLS)
    assert found.growth is not None
    assert found.growth.heads() == [second, third]
    assert [each.added for each in found.growth.rounds] == [True, True, False]
    assert {str(head) for site in found.sites for head in site.each()} == {second, third}
    assert found.blend is None  # nothing costs the text, so attention replaces the SSM
    assert found.growth.measured == len(measurements.asked) == 1 + (4 + 2 + 2) + (4 + 2) * 2
    assert found.growth.seconds == 0.5 * found.growth.measured
    assert found.growth.rounds[0].trials[found.growth.rounds[0].best].saved.value == pytest.approx(0.5, abs=0.05)
    starts = plan(ranking, sites=found.sites).starts
    assert found.starts == starts  # what locate found best for each head


def test_what_hurts_the_text_gets_a_small_gate(base, tokenizer, ranking, monkeypatch):
    first = leading(ranking, 1)[0]
    for cost, gate in ((0.0, None), (0.2, 0.5), (5.0, 0.1)):
        made(monkeypatch, {first: 2.0}, cost=cost)
        assert grow(base, ranking, options(text_weight=4.0), tokenizer=tokenizer, data=NO_SKILLS).blend == gate
    made(monkeypatch, {first: 2.0}, cost=1.0)
    fixed = options().model_copy(update={"blend": 0.25})
    assert grow(base, ranking, fixed, tokenizer=tokenizer, data=NO_SKILLS).blend == 0.25
    made(monkeypatch, {first: 2.0}, cost=5.0)
    assert grow(base, ranking, options(text_weight=0.0), tokenizer=tokenizer, data=NO_SKILLS).blend is None


def test_it_stops_at_the_most_heads_and_where_nothing_is_sure(base, tokenizer, ranking, monkeypatch):
    made(monkeypatch, dict.fromkeys(leading(ranking, 6), 1.0))
    assert len(grow(base, ranking, options(), tokenizer=tokenizer, data=NO_SKILLS).growth.heads()) == 3
    first = leading(ranking, 1)[0]
    made(monkeypatch, {first: 0.015})
    with pytest.raises(UserError, match=r"no head is worth its cache: of the 4 leading ones none saves 0.02 nats \(the best, "):
        grow(base, ranking, options(), tokenizer=tokenizer, data=NO_SKILLS)
    made(monkeypatch, {first: 0.015})
    assert grow(base, ranking, options(least_gain=0.01), tokenizer=tokenizer, data=NO_SKILLS).growth.heads() == [first]
    unsure = Made({})

    def by_chance(_, chosen):
        measured = unsure(chosen)
        if chosen is not None:  # a mean of .5 nats, from two questions alone
            measured.loss[:2] -= 10
        return measured

    monkeypatch.setattr(Measuring, "_measure", by_chance)
    with pytest.raises(UserError, match="no head is worth its cache"):
        grow(base, ranking, options(), tokenizer=tokenizer, data=NO_SKILLS)


def test_measurements_are_of_the_hybrid_on_questions_that_ranked_nothing(base, tokenizer, ranking):
    asked = ChoiceTask.of(base, ranking, options(), tokenizer=tokenizer).questions
    assert not {*asked} & {*KVRetrieval(4).questions(8, 1)}
    subject = Subject.of(base, tokenizer)
    ids = torch.randint(1, 200, (3, 10), generator=torch.Generator().manual_seed(0))
    real = torch.arange(10) < torch.tensor([10, 4, 7])[:, None]
    chosen = plan(ranking, 2, blend=0.5)
    before, after = Measuring(subject, asked, (ids, real), batch_size=5).measure([None, chosen], "both")
    hybrid = install(subject.model, chosen).eval()
    assert after.loss == pytest.approx(answer(hybrid, tokenizer, asked).loss, abs=1e-5)
    with torch.no_grad():
        log_p = hybrid(input_ids=ids).logits.log_softmax(-1)
    for row, length in enumerate((10, 4, 7)):
        nats = [-log_p[row, i - 1, ids[row, i]].item() for i in range(1, length)]
        assert after.text[row] == pytest.approx(np.mean(nats), abs=1e-5)
    assert not np.allclose(before.loss, after.loss)


def test_what_was_measured_is_kept_and_the_plan_comes_out_the_same(base, tokenizer, ranking, tmp_path, monkeypatch):
    def found() -> str:
        chosen = grow(base, ranking, options(least_gain=0.0, gates=(1.0,)), tokenizer=tokenizer, data=NO_SKILLS, kept=tmp_path)
        return chosen.model_dump_json(exclude={"provenance"})

    monkeypatch.setattr(growing._Growing, "_saved", lambda self, before, after, level=0.05: Saved(value=1.0, ci95=(1.0, 1.0)))
    first = found()
    files = sorted(tmp_path.iterdir())
    assert len(files) == json.loads(first)["growth"]["measured"] > 4
    monkeypatch.setattr(Measuring, "_measure", None)  # nothing is measured again
    assert found() == first
    assert sorted(tmp_path.iterdir()) == files


def test_of_a_mamba_1_blocks_of_channels_are_added(tokenizer, monkeypatch):
    model = random_selective(MambaConfig, MambaForCausalLM, vocab_size=len(tokenizer))
    scores = locate(model, tokenizer, options={"pairs": 4}, examples=4, exact=False, layers=False)
    order = [scores.columns.site(int(i)) for i in scores.columns.order()]
    made(monkeypatch, {str(head): 0.03 for head in order})
    found = grow(model, scores, options(), tokenizer=tokenizer, data=NO_SKILLS)
    assert found.growth is not None
    added = [Site.parse(text) for text in found.growth.heads()]
    assert [len(site.heads) for site in added] == [CHANNELS] * 3
    assert len({head for site in added for head in site.each()}) == 3 * CHANNELS
    leading = [head for head in order if head.layer == added[0].layer][:CHANNELS]
    assert added[0] == Site(added[0].layer, tuple(head.heads[0] for head in leading))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 32))
def test_no_growth_measures_more_than_is_announced(max_heads, candidates, gates, heads):
    auto = Auto(max_heads=max_heads, candidates=candidates, gates=tuple((i + 1) / gates for i in range(gates)))
    plans, rng = [], random.Random(max_heads + candidates)

    class Nothing:
        def measure(self, those, description):
            plans.extend(those)
            return [PlanMeasurement(np.zeros(2), np.zeros(2), np.zeros(2), 0.0) for _ in those]

    chosen = PlanOptions(heads="auto", auto=auto)
    of_plan = {"measuring": Nothing(), "plan": lambda sites, blend: (tuple(sites), blend), "units": lambda count: []}
    rounds = growing._Growing(SimpleNamespace(options=chosen, gates=[*reversed(auto.gates)], **of_plan))
    rounds.bounds = SimpleNamespace(beyond=lambda _: ())
    rounds._saved = lambda before, after: Saved(value=rng.random(), ci95=(0, 0))
    sites, left, blend = [], list(range(heads)), None
    while left and len(sites) < max_heads:
        tried = rounds._round(sites, left[:candidates], blend, None)
        site, blend = rng.choice(list(tried))
        sites.append(site)
        left.remove(site)
    assert len(plans) == len({*plans}) < most(chosen, heads, bounded=True).plans


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["plan.heads=auto", "plan.sites=L0.H1"], "auto chooses the heads"),
        (["plan.heads=auto", "plan.kind=layer"], "counts heads, and kind is layer"),
    ],
)
def test_what_does_not_fit_is_refused(settings, line):
    with pytest.raises(UserError, match=line):
        read_recipe(None, settings, model="x")


def test_a_ranking_alone_is_not_enough(ranking):
    with pytest.raises(UserError, match=r"plan.heads=auto measures the model"):
        surgery.plan(ranking, heads="auto")
