"""Encoded questions: what is scored, and where in the text it is."""

import string

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.probes import make_probe
from surgery.probes.encoded import encode
from surgery.probes.question import Question
from surgery.probes.scoring import answer, logits_at_points
from surgery.probes.toy_tokenizer import build_tokenizer
from tests.surgery.modeling.bases import make_base

TOKENIZER = build_tokenizer()
MIXED = [
    Question("At noon the lamp of", (" Barin", " Bamek was", " Bamek saw a cat", "!"), 2),
    *make_probe("kv", pairs=5).questions(3, 1),
    Question("Before dawn", (" Toshak went",), 0),
    *make_probe("kv", pairs=4, between=5).questions(2, 1),
    Question("In the yard ", ("Barin", "the dog"), 1),
]


@pytest.fixture(scope="module")
def model():
    return make_base("mamba2", vocab_size=-(-len(TOKENIZER) // 16) * 16)


def score(model, prompt, choice):
    """Summed log-probability of a choice behind a prompt, by one forward of both."""
    bare = prompt.rstrip()
    begin, whole = (TOKENIZER(text)["input_ids"] for text in (bare, prompt + choice))
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(-1)
    places = range(len(begin), len(whole))
    greedy = all(int(log_p[place - 1].argmax()) == whole[place] for place in places)
    return sum(float(log_p[place - 1, whole[place]]) for place in places), greedy


def test_scores_are_summed_log_probabilities(model):
    encoded = encode(TOKENIZER, MIXED)
    logits = logits_at_points(model, encoded).detach()
    scores, loss, correct = encoded.scores(logits), encoded.loss(logits), encoded.correct(logits)
    for q, question in enumerate(MIXED):
        expected = torch.tensor([score(model, question.prompt, choice)[0] for choice in question.choices])
        torch.testing.assert_close(scores[q, : len(expected)].double(), expected.double(), rtol=1e-4, atol=1e-4)
        assert scores[q, len(expected) :].isinf().all()
        if len(expected) > 1:
            assert float(loss[q]) == pytest.approx(float(expected.logsumexp(0) - expected[question.answer]), abs=1e-3)
            assert bool(correct[q]) == (int(expected.argmax()) == question.answer)
        else:
            assert float(loss[q]) == pytest.approx(-float(expected[0]), abs=1e-3)
            assert bool(correct[q]) == score(model, question.prompt, question.choices[0])[1]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_answers_do_not_depend_on_the_batch(model, batch_size):
    whole = answer(model, TOKENIZER, MIXED)
    parts = answer(model, TOKENIZER, encode(TOKENIZER, MIXED), batch_size=batch_size)
    assert (whole.correct == parts.correct).all()
    assert abs(whole.loss - parts.loss).max() < 1e-4


def test_single_tokens_share_a_row():
    encoded = encode(TOKENIZER, make_probe("kv", pairs=5).questions(3, 1))
    assert len(encoded.rows) == len(encoded) == 3
    assert len(encoded.points) == 3


@pytest.mark.parametrize("one_length", [False, True])
def test_batches_hold_every_question_once(one_length):
    questions = [*MIXED, *make_probe("needle", TOKENIZER, length=90).questions(3, 1)]
    encoded, seen = encode(TOKENIZER, questions), []
    for chosen, part in encoded.batches(4, one_length):
        seen += chosen
        assert len(part) == len(chosen)
        assert len(part.rows) <= 4 or len(chosen) == 1
        assert not one_length or len({*part.query.tolist()}) == 1
        assert part.answers.tolist() == [questions[q].answer for q in chosen]
    assert sorted(seen) == list(range(len(questions)))


def test_places_divide_the_tokens():
    encoded = encode(
        TOKENIZER, [*make_probe("kv", pairs=5).questions(3, 1), *make_probe("kv", pairs=4, between=5).questions(2, 1)]
    )
    masks = {place: encoded.mask(place) for place in ("query", "evidence", "spans", "elsewhere", "everywhere")}
    assert torch.equal(masks["query"].int() + masks["spans"].int() + masks["elsewhere"].int(), masks["everywhere"].int())
    assert not (masks["evidence"] & ~masks["spans"]).any()
    assert masks["everywhere"].sum(1).tolist() == [len(row) for row in encoded.rows]


def test_ends_hold_the_value_of_a_pair():
    question = make_probe("kv", pairs=5).questions(1, 1)[0]
    encoded = encode(TOKENIZER, [question])
    texts = [[TOKENIZER.decode(encoded.rows[0][place]) for place in ends] for ends in encoded.ends[0]]
    for ends, value in zip(texts, question.choices, strict=True):
        assert ends[:3] == [":", value, "\n"]
    assert encoded.mask("evidence")[0].nonzero()[:, 0].tolist() == encoded.ends[0][question.answer]
    assert int(encoded.query[0]) == len(encoded.rows[0]) - 1


def test_out_of_order_moves_the_records_alone():
    encoded = encode(TOKENIZER, make_probe("kv", pairs=5).questions(3, 1))
    turned, spans = encoded.out_of_order(), encoded.mask("spans")
    for row, other, mask in zip(encoded.rows, turned.rows, spans.tolist(), strict=True):
        assert row != other
        assert sorted(row) == sorted(other)
        assert [t for t, m in zip(row, mask, strict=False) if not m] == [t for t, m in zip(other, mask, strict=False) if not m]


@pytest.mark.parametrize("question", [Question("", ("a", "b"), 0), Question("one", ("", " two"), 0)])
def test_what_has_no_tokens_is_refused(question):
    with pytest.raises(UserError):
        encode(TOKENIZER, [question])


def test_a_value_that_begins_another_ends_with_its_line():
    """Where a digit is a token, who is sure of every token of the right value answers it."""
    letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted({*string.printable}))}, merges=[]))
    encoded = encode(PreTrainedTokenizerFast(tokenizer_object=letters), make_probe("kv", TOKENIZER, pairs=64).questions(20, 0))
    logits = torch.zeros(len(encoded.points), len(string.printable))
    right = encoded.terms[:, 1] == encoded.answers[encoded.terms[:, 0]]
    logits[encoded.terms[right, 2], encoded.terms[right, 3]] = 20.0
    assert encoded.correct(logits).all()
    assert encoded.loss(logits).max() < 1e-5


def test_logits_that_are_not_finite_are_refused(model):
    weight = model.lm_head.weight
    own = weight.data
    weight.data = torch.full_like(own, torch.nan)
    try:
        with pytest.raises(UserError):
            answer(model, TOKENIZER, MIXED[:1])
    finally:
        weight.data = own
