"""Probes: seeded, by the published protocol, exact for candidates of several tokens."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.pretraining.lessons import letter_pieces
from surgery.probes import scoring
from surgery.probes.encoded import encode
from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.kv import KVRetrieval
from surgery.probes.perplexity import TextWindows
from surgery.probes.question import Question
from surgery.probes.scoring import answer
from surgery.world.facts import facts
from surgery.world.text import document
from surgery.world.tokenizer import build_tokenizer
from tests.models import SAME, random_base


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    """One token a character: every number above 9 has two."""
    vocabulary = {chr(i): i for i in range(32, 127)} | {"\n": 0, "?": 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def test_kv_prompt_is_the_published_one():
    question = KVRetrieval(3).questions(1, seed=0)[0]
    lines = question.prompt.split("\n")
    assert lines[0] == "Memorize the following dictionary:"
    pairs = dict(line.split(":") for line in lines[1:4])
    key = lines[4].removeprefix("The value of the key '").removesuffix("' is")
    assert question.choices[question.answer] == pairs[key]
    assert question.choices == tuple(pairs.values())
    assert all(0 <= int(value) <= 99 for value in pairs.values())
    assert len(set(pairs.values())) == 3
    assert [question.prompt[a:b] for a, b in question.spans] == [f"{line}\n" for line in lines[1:4]]


def one_at_a_time(model, tokenizer, question: Question) -> np.ndarray:
    """The published way: a forward for every candidate, its tokens' log-probabilities summed."""
    prompt, scores = tokenizer(question.prompt)["input_ids"], []
    for choice in question.choices:
        tokens = tokenizer(choice, add_special_tokens=False)["input_ids"]
        log_p = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        scores.append(sum(log_p[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens)))
    return np.array(scores)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("probe", [KVRetrieval(5), Knowledge("capitals"), Letters("capitals")])
@torch.inference_mode()
def test_scores_equal_the_published_protocol(probe, characters):
    model, questions = random_base(vocab_size=128).double(), probe.questions(3, seed=0)
    encoded = encode(characters, questions)
    logits = torch.stack([model(torch.tensor([row])).logits[0, -1] for row in encoded.rows])
    scores = encoded.scores(logits)
    result = answer(model, characters, questions, batch_size=4)
    for i, question in enumerate(questions):
        wanted = one_at_a_time(model, characters, question)
        np.testing.assert_allclose(scores[i, : len(wanted)].numpy(), wanted, **SAME)
        assert result.correct[i] == (wanted.argmax() == question.answer)
        np.testing.assert_allclose(result.loss[i], np.logaddexp.reduce(wanted) - wanted[question.answer], **SAME)


def test_single_token_candidates_take_one_row(characters):
    question = Question("a:1\nb:2\nb is", ("1", "2"), 1)
    assert len(encode(characters, [question]).rows) == 1
    assert len(encode(characters, [Question("x", ("11", "12", "23", "4"), 0)]).rows) == 3  # prefixes "", "1", "2"


def test_a_tuple_of_questions_is_encoded_once_for_all_models(characters, monkeypatch):
    encoded = []
    monkeypatch.setattr(scoring, "encode", lambda tokenizer, questions: encoded.append(1) or encode(tokenizer, questions))
    questions = tuple(KVRetrieval(4).questions(6, seed=1))
    for size in (8, 16):
        model = random_base(vocab_size=128, state_size=size)
        asked = [answer(model, characters, questions, 64).loss for _ in range(2)]
        assert len(encoded) == 1
        assert np.array_equal(*asked)
    assert np.array_equal(answer(model, characters, list(questions), 64).loss, asked[0])
    assert len(encoded) > 1  # a list may have changed


@pytest.mark.usefixtures("in_float64")
def test_perplexity_is_the_mean_over_predicted_tokens(characters, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    probe, model = TextWindows(str(tmp_path / "text.txt"), windows=5, window=32), random_base(vocab_size=128).double()
    windows = probe.token_windows(characters, seed=0)
    assert windows.shape == (5, 32)
    for ids, loss in zip(windows, probe.losses(model, windows, batch_size=2), strict=True):
        assert loss == pytest.approx(model(ids[None], labels=ids[None]).loss.item(), rel=1e-9)


def test_missing_and_malformed_sources_are_refused(tmp_path, characters):
    with pytest.raises(UserError, match="cannot read the facts"):
        Knowledge(str(tmp_path / "none.jsonl")).questions(1, 0)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x", "answer": " a", "choices": [" b"]}\n')
    with pytest.raises(UserError, match="line 1"):
        Letters(str(tmp_path / "bad.jsonl")).questions(1, 0)
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(UserError, match="perplexity needs at least"):
        TextWindows(str(tmp_path / "short.txt")).token_windows(characters, 0)


def test_the_world_holds_out_what_it_says():
    import random

    training = " ".join(document(random.Random(seed), held_out=False) for seed in range(300))
    held_out = " ".join(document(random.Random(seed), held_out=True) for seed in range(300))
    seen = set(training.split(". "))
    assert not seen & set(held_out.split(". "))
    for fact in facts():
        assert f"{fact.prompt(fact.held_out_template)} {fact.value}." not in training
    trained = {text for seed in range(200) for text, is_target in letter_pieces(random.Random(seed), 6) if not is_target}
    assert not {question.prompt for question in Letters().questions(500, seed=0)} & {text.strip() for text in trained}


def test_the_worlds_tokenizer_keeps_words_and_numbers_whole_and_text_intact():
    tokenizer = build_tokenizer()
    assert all(len(tokenizer(str(number))["input_ids"]) == 1 for number in range(100))
    prompt = KVRetrieval(64).questions(1, seed=0)[0].prompt
    assert len(tokenizer(prompt)["input_ids"]) == 4 * 64 + 15
    for text in (prompt, "Ünïcode 123  and\tunknown wörds"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_worlds_tokenizer_is_the_checkpoints(tiny):
    assert tiny.tokenizer.get_vocab() == build_tokenizer().get_vocab()


def test_choices_are_drawn_from_the_other_answers(tmp_path):
    """Where a line has none; the same in every process, and every answer among them once."""
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": f"The code of room {n} is", "answer": str(n % 20)} for n in range(40)]
    lines.append({"prompt": "The key:", "answer": "blue", "choices": ["red", "blue"]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, again = (Knowledge(str(path)).questions(99, seed=0) for _ in range(2))
    assert first == again
    assert first[-1].choices == ("red", "blue")
    for line, question in zip(lines[:-1], first, strict=False):
        assert question.choices[question.answer] == f" {line['answer']}"
        assert len(set(question.choices)) == len(question.choices) == 10
    assert {len(question.choices) for question in Letters(str(path)).questions(9, seed=0)} == {4}
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(UserError, match="choices are drawn from the other answers, and there is only 'b'"):
        Knowledge(str(path)).questions(1, seed=0)
