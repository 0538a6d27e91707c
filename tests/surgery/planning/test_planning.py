"""Plans: which heads, and null keys that are open on a share of text."""

import numpy as np
import pytest
import torch

from surgery.errors import UserError
from surgery.locating.nulls import solve_null
from surgery.modeling.graft import watched
from surgery.pipeline import locate_heads
from surgery.planning.calibrate import calibrate, fit_queries
from surgery.planning.choose import choose, make_plan, read_plain_text
from surgery.probes import make_probe
from surgery.probes.encoded import encode
from surgery.probes.scoring import Answers
from surgery.records.plan import Plan, Start
from surgery.records.ranking import Estimate, HeadScore, Ranking
from surgery.records.recipe import Data, PlanOptions, Tune, make_recipe
from surgery.records.site import Site
from surgery.splicing.splice import splice
from surgery.tuning.examples import Batches
from tests.surgery.modeling import bases
from tests.surgery.tuning.small import TOKENIZER, toy_base

ONE = Estimate(mean=0.5, low=0.4, high=0.6, n=10)


def ranking(*units: tuple[str, float], kind: str = "ssm") -> Ranking:
    """A ranking of some units."""
    heads = [HeadScore(site=Site.parse(site), kind=kind, slope=slope, start=Start(tau=2.0)) for site, slope in units]
    return Ranking(heads=tuple(heads), probe="kv", accuracy=ONE, chance=0.1, loss=1.0, questions=10)


LEADING = ranking(("L1.H3", 3.0), ("L0.H2", 2.0), ("L1.H0", 1.0), ("L0.H5", -1.0))


@pytest.fixture(scope="module")
def base():
    return toy_base(dtype=torch.float32)


@pytest.mark.parametrize("family", bases.BASES)
@pytest.mark.parametrize(("share", "tau"), [(0.01, 0.5), (0.2, 0.5), (0.01, 50.0)])
def test_untrained_grafts_are_open_on_their_share(family, share, tau):
    base, rows = bases.make_base(family), bases.make_rows(6, 50)
    starts = {name: Start(sign=1, tau=tau) for name in ("L0.H1", "L0.H4", "L1.H2")}
    plan = calibrate(base, Plan(sites=("L0.H1,4", "L1.H2"), starts=starts), rows, share, batch_size=4)
    assert {start.sign for start in plan.starts.values()} == {1}
    # One graft at a time: each reads what it reads in the base.
    for site in ("L0.H1,4", "L1.H2"):
        names = [f"L{Site.parse(site).layer}.H{head}" for head in Site.parse(site).heads]
        alone = Plan(sites=(site,), starts={name: plan.starts[name] for name in names})
        hybrid, seen = splice(base, alone).eval(), []
        hybrid.mixer_at(Site.parse(site).layer).graft.watch = lambda _, m, seen=seen: seen.append(m[:, 8:])
        with torch.no_grad():
            hybrid(input_ids=rows)
        mean = seen[0].mean((0, 1))
        expected = mean.mean() if family in ("mamba", "falcon_mamba") else mean
        torch.testing.assert_close(expected, torch.full_like(expected, share), rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("share", [0.001, 0.5])
def test_a_null_key_is_solved_for_its_share(share):
    lse = torch.randn(4000, generator=torch.Generator().manual_seed(1)).double() * 10
    assert float((lse - solve_null(lse, share)).sigmoid().mean()) == pytest.approx(share, rel=0.01)


def test_null_keys_are_not_set_on_toy_text_for_a_model_that_does_not_know_it(base, monkeypatch, capsys):
    monkeypatch.setattr("surgery.tuning.text.is_toy_tokenizer", lambda _: False)
    with pytest.raises(UserError, match="toy data"):
        choose(base, TOKENIZER, LEADING, PlanOptions(heads=1))
    with pytest.raises(UserError, match="toy data"):
        Batches(TOKENIZER, Tune(steps=1), Data(), 0)
    ranked = locate_heads(base, TOKENIZER, make_recipe({"model": "m", "locate": {"examples": 2, "roles": 0}}, "m"), "0")
    choose(base, TOKENIZER, ranked, PlanOptions(heads=1, share=None))
    said = capsys.readouterr().err
    assert "holds no text of the kind" in said
    assert "no better than chance" in said


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_null_keys_that_read_the_query_tell_questions_apart(family):
    base = toy_base(family, dtype=torch.float32)
    plan = Plan(sites=("L0.H1,2", "L1.H3"), starts={name: Start(tau=0.5) for name in ("L0.H1", "L0.H2", "L1.H3")}, gate=0.0)
    wanted, kept = (
        encode(TOKENIZER, make_probe(name, **given).questions(24, 1)) for name, given in (("kv", {"pairs": 8}), ("choice", {}))
    )
    rows = read_plain_text(TOKENIZER, Data(), 8, 1)
    fitted = fit_queries(base, plan, wanted, kept, rows)
    assert all(len(start.null_query) >= 8 and start.tau == 0.5 for start in fitted.starts.values())
    hybrid, shares = splice(base, fitted).eval(), list[torch.Tensor]()
    with watched([hybrid.mixer_at(layer).graft for layer in (0, 1)], lambda _, m: shares.append(m)), torch.no_grad():
        hybrid(input_ids=wanted.padded(), use_cache=False)
        hybrid(input_ids=kept.padded(), use_cache=False)
    for asked, other in zip(shares[:2], shares[2:], strict=True):
        assert asked[wanted.mask("query")].mean() > 0.8
        assert other[kept.mask("everywhere")].mean() < 0.2


@pytest.mark.parametrize("data", [Data(), Data(skills=())])
def test_other_skills_are_kept_apart_by_questions_and_skills_alone(base, data):
    questions = make_probe("kv", pairs=4).questions(8, 1) if not data.skills else ()
    with pytest.raises(UserError):
        choose(base, TOKENIZER, LEADING, PlanOptions(keep_skills=True), data, questions=questions)


def test_the_leading_units_are_chosen(base):
    plan = choose(base, TOKENIZER, LEADING, PlanOptions(heads=2), seed=1)
    assert plan.sites == (Site(0, (2,)), Site(1, (3,)))
    assert all(start.null is not None and start.tau == 2.0 for start in plan.starts.values())


def test_sites_of_ones_own_are_kept(base):
    plan = choose(base, TOKENIZER, LEADING, PlanOptions(sites=("L1.H0,5",), share=None))
    assert plan.sites == (Site(1, (0, 5)),)
    assert plan.start(1, 0) == Start(tau=2.0)
    assert plan.start(1, 5) == Start()
    assert plan.closed_below == 0


def test_layers_are_chosen_by_their_heads(base):
    plan = choose(base, TOKENIZER, LEADING, PlanOptions(kind="layer", layers=2))
    assert plan.kind == "layer"
    assert plan.sites == (Site(0), Site(1))


def test_heads_are_tried_before_they_are_taken(base, monkeypatch):
    """The first must not answer fewer, unless all do; a later one has to help."""
    asked = make_probe("kv", pairs=4).questions(8, 1)
    losses = {"base": 3.0, "L1.H3": 3.5, "L0.H2": 3.5, "L1.H0": 1.0, "L0.H5": 0.99}
    found = {name: Answers(np.arange(100) < 50 - 25 * (name == "L1.H3"), np.full(100, loss)) for name, loss in losses.items()}
    monkeypatch.setattr("surgery.planning.choose.answer", lambda *_, what: found[what])
    options = PlanOptions(heads="auto", max_heads=3)
    assert choose(base, TOKENIZER, LEADING, options, questions=asked).sites == (Site(0, (2,)), Site(1, (0,)))
    assert choose(base, TOKENIZER, ranking(("L1.H3", 1.0)), options, questions=asked).sites == (Site(1, (3,)),)


@pytest.mark.parametrize(
    ("ranked", "options"),
    [
        (LEADING, PlanOptions(heads="auto")),
        (LEADING, PlanOptions(sites=("L7.H0",))),
        (ranking(("L0.H1", 1.0), kind="attention"), PlanOptions()),
    ],
)
def test_plans_that_cannot_be_are_refused(base, ranked, options):
    with pytest.raises(UserError):
        choose(base, TOKENIZER, ranked, options)


def test_a_plan_is_made_of_sites_alone(base):
    plan = make_plan(base, TOKENIZER, [Site(0, (1,)), Site(0, (4,))], {"L0.H1": Start(sign=-1)}, PlanOptions(), Data(), 3)
    assert plan.sites == (Site(0, (1, 4)),)
    assert plan.start(0, 1).sign == -1
    assert plan.seed == 3
