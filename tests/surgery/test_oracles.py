"""Oracles: what a perfect choice would bring."""

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from surgery.locating.attribution_memory import intercept_ssm_output
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated
from surgery.models.tokens import token_spans
from surgery.more.oracles import PLACES, OracleHead, Oracles, plan_at
from surgery.probes import make
from surgery.probes.encoded import encode, padded
from surgery.probes.scoring import answer
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.splicing.splice import splice
from tests.models import VOCABULARY, random_base, random_selective

BASES = {"mamba2": random_base, "mamba": lambda **fields: random_selective(MambaConfig, MambaForCausalLM, **fields)}


@pytest.fixture(params=BASES)
def made(request):
    return BASES[request.param]


def gated(model, tokenizer):
    return fully_gated(Subject.of(model, tokenizer))


def kv(pairs, n, seed=0):
    return make("kv", pairs=pairs).questions(n, seed)


@pytest.mark.usefixtures("in_float64")
def test_without_an_oracle_the_model_answers_as_it_is(made, tokenizer):
    base, questions = made(vocab_size=VOCABULARY).double(), kv(4, 7)
    found = Oracles(gated(base, tokenizer), questions, batch_size=3).outcome()
    expected = answer(base, tokenizer, questions)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-9)
    assert (found.correct == expected.correct).all()


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("sign", [1, -1])
def test_a_perfect_choice_is_attention_to_one_token(made, tokenizer, sign, monkeypatch):
    """In a model of one layer, where no other token matters: a graft of that sign whose attention is all at that token."""
    base, (question,) = made(vocab_size=VOCABULARY, num_hidden_layers=1).double(), kv(4, 1)
    found = Oracles(gated(base, tokenizer), [question]).outcome([OracleHead(Site(0, (3,)), back=2, sign=sign)])
    hybrid = splice(base, Plan.model_validate({"sites": ("L0.H3",), "starts": {"L0.H3": {"sign": sign}}, "time_step": False}))
    graft = hybrid.base_model.layers[0].mixer.graft
    ids, spans = token_spans(tokenizer, question.prompt, question.spans)
    own, place = graft.attend, spans[question.evidence][-1] - 1

    def one_token(q, k, v, mask):
        """As if all keys were that token's: whatever the weights are, their sum is 1."""
        return own(q, k, v[:, :, place : place + 1].expand_as(v), mask)

    monkeypatch.setattr(graft, "attend", one_token)
    encoded = encode(tokenizer, [question])
    assert encoded.rows == [ids]
    logits = hybrid.double()(padded(encoded.rows, torch.device("cpu"))[0]).logits[:, -1]
    assert found.loss[0] == pytest.approx(encoded.losses(logits).item(), rel=1e-9)
    assert found.loss[0] != pytest.approx(answer(base, tokenizer, [question]).loss[0], rel=1e-6)


def test_carriers_are_where_the_built_in_model_retrieves(tiny):
    """In its first layer; and with a perfect choice there more is right than as it is."""
    subject = fully_gated(Subject.of(tiny))
    questions = make("kv", pairs=32, keys="lessons").questions(16, 1)
    oracles = Oracles(subject, questions)
    ((carrier, outcome),) = oracles.carriers(1, candidates=2)
    assert carrier.site.layer == 0
    assert outcome.loss.mean() < 0.7 * oracles.outcome().loss.mean()


def test_carriers_are_added_while_they_save_loss(tiny, monkeypatch):
    """One after the other, the best first, and a plan has their signs."""
    monkeypatch.setattr("surgery.more.oracles.TRIED", 2)
    subject = fully_gated(Subject.of(tiny))
    oracles = Oracles(subject, make("kv", pairs=16, keys="lessons").questions(8, 1))
    found = oracles.carriers(3, candidates=3, worth=0.0)
    assert 1 <= len(found) <= 3
    losses = [oracles.outcome().loss.mean(), *(outcome.loss.mean() for _, outcome in found)]
    assert losses == sorted(losses, reverse=True)
    carriers = [carrier for carrier, _ in found]
    assert len({carrier.site for carrier in carriers}) == len(carriers)
    chosen = plan_at(carriers)
    assert {(head, chosen.start(site.layer, head).sign) for site in chosen.sites for head in site.heads} == {
        (carrier.site.heads[0], carrier.sign) for carrier in carriers
    }
    assert chosen.places == {str(carrier.site): carrier.back for carrier in carriers}
    assert oracles.carriers(3, candidates=1, worth=100.0) == []


@pytest.mark.usefixtures("in_float64")
def test_slopes_are_those_of_the_loss(made, tokenizer):
    """Against a small step towards a perfect choice, at every place of a few heads."""
    base, questions = made(vocab_size=VOCABULARY).double(), kv(4, 5)
    subject = gated(base, tokenizer)
    oracles = Oracles(subject, questions, batch_size=3)
    slopes = oracles.slopes()
    assert len(slopes) == len(subject.anatomy.sites()) * len(PLACES) * 2
    step, whole = 1e-6, oracles.outcome().loss.mean()
    for carrier in (
        OracleHead(Site(0, (1,)), 2),
        OracleHead(Site(1, (3,)), 0, -1),
        OracleHead(Site(2, (5,)), 3),
        OracleHead(Site(1, (0,)), -4),
    ):
        near = np.zeros(len(questions))
        for batch in oracles.batches:
            one = oracles._carrying(batch, [carrier])

            def towards(number, mixer, y, args, kwargs, one=one):
                return y + step * (one(number, mixer, y, args, kwargs) - y)

            with torch.no_grad(), intercept_ssm_output(oracles.mixers, towards, always=True):
                near[batch.chosen] = batch.encoded.losses(oracles._logits(batch)).numpy()
        assert slopes[carrier] == pytest.approx((whole - near.mean()) / step, rel=1e-3, abs=1e-9)
