"""The KV sweep and the replacement sweep, against the same done by hand."""

import copy

import pytest
import torch

from surgery.errors import UserError
from surgery.locating.subject import Subject
from surgery.models.anatomy import anatomy
from surgery.probes.knowledge import Knowledge
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import answer
from surgery.records.plan import Plan
from surgery.records.recipe import Locate
from surgery.records.site import Site
from surgery.splicing.splice import splice
from surgery.studies.kv_sweep import CONTROL, kv_sweep
from surgery.studies.prune import Pruner
from surgery.studies.replacement import replacement_sweep
from surgery.world.tokenizer import build_tokenizer
from tests.models import VOCABULARY, random_llamba
from tests.surgery.test_layer_graft import random_donor
from tests.surgery.test_replay import untouched

SIZES = (4, 8)


def test_a_curve_without_heads_equals_zeroed_weights(tiny):
    subject, heads = Subject.of(tiny), [Site(0, (3, 5))]
    model = subject.model
    curves = kv_sweep(subject, SIZES, {"aggregate": heads}, controls=2, examples=24, seed=3)
    assert [curve.what for curve in curves] == ["whole", "aggregate", f"{CONTROL} (1)", f"{CONTROL} (2)"]
    cut = copy.deepcopy(model)
    with torch.no_grad():
        mixer = anatomy(cut).mixer_of(Site(0, (3,)))
        for head in (3, 5):
            mixer.out.weight[:, mixer.columns(head)] = 0
    for size in SIZES:
        questions = KVRetrieval(size).questions(24, 3)
        whole, without = (answer(one, tiny.tokenizer, questions).correct for one in (model, cut))
        assert curves[0].accuracy[size].accuracy == whole.mean()
        assert curves[0].drop[size].value == 0
        assert curves[1].accuracy[size].accuracy == without.mean()
        assert curves[1].drop[size].value == pytest.approx(whole.mean() - without.mean())
    assert untouched(model)


def test_random_heads_are_as_many_and_none_of_the_groups(tiny):
    groups = {"a": [Site(0, (3, 5))], "b": [Site(1, (2,))]}
    curves = kv_sweep(Subject.of(tiny), (4,), groups, controls=3, examples=2)
    taken = {head for curve in curves[1:3] for head in curve.silent}
    assert taken == {Site(0, (3,)), Site(0, (5,)), Site(1, (2,))}
    drawn = [set(curve.silent) for curve in curves[3:]]
    assert all(len(heads) == 2 and not heads & taken for heads in drawn)
    assert len(set(map(frozenset, drawn))) > 1


def test_a_sweep_of_the_first_layers(tiny):
    subject, questions = Subject.of(tiny), KVRetrieval(4).questions(16, 0)
    curves = kv_sweep(subject, (4,), {"a": [Site(0, (3,))]}, layers=1, examples=16)
    shorter = copy.deepcopy(subject.model)
    shorter.backbone.layers = shorter.backbone.layers[:1]
    assert curves[0].accuracy[4].accuracy == answer(shorter, tiny.tokenizer, questions).correct.mean()
    assert all(site.layer == 0 for curve in curves for site in curve.silent)
    with pytest.raises(UserError, match=r"L1.H2 is not among the first 1 layers"):
        kv_sweep(subject, (4,), {"a": [Site(1, (2,))]}, layers=1, examples=2)
    with pytest.raises(UserError, match="no site L4"):
        kv_sweep(subject, (4,), {"a": [Site(1, (2,))]}, layers=5, examples=2)


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        ({}, "needs the heads that are to be ablated"),
        ({"a": [Site(layer, tuple(range(8))) for layer in range(3)]}, "has 8 other heads; a control needs 24"),
    ],
)
def test_impossible_sweeps_are_refused(tiny, groups, complaint):
    with pytest.raises(UserError, match=complaint):
        kv_sweep(Subject.of(tiny), (4,), groups, examples=2)


@pytest.mark.usefixtures("in_float64")
def test_every_layer_in_turn_from_a_donor():
    tokenizer = build_tokenizer()
    vocabulary = VOCABULARY
    base = random_llamba(vocab_size=vocabulary).double()
    donor = random_donor(vocab_size=vocabulary).double()
    whole = Pruner(Subject.of(base, tokenizer), Locate(options={"pairs": 4}, examples=12), Knowledge())
    outcomes = replacement_sweep(whole, donor, layers=[0, 2])
    assert [outcome.replaced for outcome in outcomes] == [(0,), (2,)]
    plan = Plan(kind="layer", sites=(Site(2),), donor="the donor", mlp=True)
    result = answer(splice(base, plan, donor), tokenizer, whole.questions["retrieval"])
    assert outcomes[1].retrieval.loss.value == pytest.approx(result.loss.mean(), rel=1e-9)
    assert outcomes[0].retrieval.loss.value != pytest.approx(outcomes[1].retrieval.loss.value, abs=1e-6)
    with pytest.raises(UserError, match="no site L3"):
        replacement_sweep(whole, donor, layers=[3])
