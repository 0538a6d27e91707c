"""Training examples: targets are the answers, evidence is where they stand, and what bench keeps for itself is not shown."""

import random
import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.probes import make_probe
from surgery.probes.kv import ask_value
from surgery.probes.question import Question
from surgery.probes.toy import key_words
from surgery.records.recipe import Data, Examples, Hints
from surgery.tuning.examples import (
    Batches,
    ExampleSource,
    SkillSource,
    dictionary_example,
    encode_examples,
    question_example,
)
from surgery.tuning.losses import IGNORE
from tests.surgery.tuning.small import TOKENIZER, few_steps


def test_targets_of_dictionaries_are_the_values_that_are_asked_for() -> None:
    examples = [dictionary_example(random.Random(i), 5, 3) for i in range(4)]
    part = encode_examples(TOKENIZER, examples)
    for row, example in enumerate(examples):
        is_target = part.targets[row] != IGNORE
        assert TOKENIZER.decode(part.targets[row][is_target]) == "".join(answer for _, answer, _ in example.pieces)
        assert torch.equal(part.targets[row][is_target], part.ids[row].roll(-1)[is_target])
        whole = "".join(before + answer for before, answer, _ in example.pieces)
        assert TOKENIZER.decode(part.ids[row]).startswith(whole)


def test_the_line_break_is_taught_where_one_value_may_begin_another() -> None:
    letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted({*string.printable}))}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    end = ExampleSource(tokenizer, few_steps(), 0).end
    assert (end, ExampleSource(TOKENIZER, few_steps(), 0).end) == ("\n", "")
    examples = [dictionary_example(random.Random(0), 20, 3, end=end), question_example(Question("a:", ("3", "31"), 0), end)]
    for row, example in enumerate(examples):
        part = encode_examples(tokenizer, [example])
        written = "".join(map(tokenizer.convert_ids_to_tokens, part.targets[0][part.targets[0] != IGNORE].tolist()))
        assert written == "".join(answer for _, answer, _ in example.pieces) == ("3\n" if row else written)
        assert written.count("\n") == len(example.pieces)
        assert part.ids.shape[1] == sum(len(before + answer) for before, answer, _ in example.pieces)
    plain = dictionary_example(random.Random(0), 20, 3)
    assert "".join(b + a for b, a, _ in plain.pieces) + "\n" == "".join(b + a for b, a, _ in examples[0].pieces)
    assert question_example(Question("a:", ("3", "31"), 1), end).pieces[0][1] == "31"


@pytest.mark.parametrize("probe", ["kv", "mqar", "choice"])
def test_evidence_holds_what_answers(probe: str) -> None:
    options: dict[str, Any] = {"pairs": 6} if probe != "choice" else {}
    questions = make_probe(probe, TOKENIZER, **options).questions(5, 0)
    part = encode_examples(TOKENIZER, [question_example(question) for question in questions])
    assert part.evidence is not None
    for row, question in enumerate(questions):
        (places,) = torch.unique(part.evidence[row][part.targets[row] != IGNORE], dim=0)
        span = question.prompt[slice(*question.spans[question.evidence or 0])].strip()
        assert re.split(r"\W+", span.strip("."))[-1] in TOKENIZER.decode(part.ids[row][slice(*places.tolist())])
        assert (part.evidence[row][part.targets[row] == IGNORE] == 0).all()


def test_a_value_has_the_same_tokens_in_training_and_in_the_probe() -> None:
    from surgery.probes.encoded import encode

    questions = make_probe("kv", TOKENIZER, pairs=6, between=5).questions(6, 0)
    encoded = encode(TOKENIZER, questions)
    part = encode_examples(TOKENIZER, [question_example(question) for question in questions])
    for row in range(len(questions)):
        terms = encoded.terms[(encoded.terms[:, 0] == row) & (encoded.terms[:, 1] == encoded.answers[row])]
        assert part.targets[row][part.targets[row] != IGNORE].tolist() == terms[:, 3].tolist()


def test_only_seen_keys_are_shown_and_steps_differ() -> None:
    source = ExampleSource(TOKENIZER, few_steps(examples=(Examples(options={"pairs": (20, 40)}),)), seed=1)
    texts = [TOKENIZER.decode(row) for step in range(4) for row in source.step(step).ids]
    assert not any(ask_value(key) in text for key in key_words("unseen", 64) for text in texts)
    assert len(set(texts)) == len(texts)
    assert torch.equal(source.step(2).ids, ExampleSource(TOKENIZER, source.options, seed=1).step(2).ids)
    assert not torch.equal(source.step(2).ids, ExampleSource(TOKENIZER, source.options, seed=2).step(2).ids)


def test_entries_are_drawn_by_weight_and_numbers_from_ranges() -> None:
    entries = (Examples(options={"pairs": (2, 3)}, weight=3), Examples(probe="mqar", options={"pairs": 4}))
    source = ExampleSource(TOKENIZER, few_steps(examples=entries), seed=0)
    firsts = [TOKENIZER.decode(source.step(step).ids[0]) for step in range(80)]
    dictionaries = [text for text in firsts if text.startswith("Memorize")]
    assert 45 < len(dictionaries) < 75
    assert {text.count(":") - 1 for text in dictionaries} == {2, 3}


@pytest.mark.parametrize(
    "entry",
    [
        {"probe": "mqar", "options": {"pairs": 4}, "queries": 2},
        {"options": {"pairs": 4, "keys": "unseen"}},
        {"options": {"pairs": (2, 200)}},
        {"options": {"nothing": 1}},
    ],
)
def test_examples_that_cannot_be_made_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ExampleSource(TOKENIZER, few_steps(examples=(Examples(**entry),)), seed=0)


def test_hints_need_evidence() -> None:
    with pytest.raises(UserError, match="hints"):
        ExampleSource(TOKENIZER, few_steps(examples=(Examples(probe="knowledge"),), hints=Hints()), seed=0)


def test_a_bigram_is_read_from_where_it_stood_before(tmp_path: Path) -> None:
    words = [TOKENIZER.decode([token]).strip() for token in range(20, 60)]
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join([*words[i:], *words[i : i + 3], "."]) for i in range(12)))
    options = few_steps(bigram_weight=1.0, hints=Hints(), examples=(), text_tokens=96)
    part = Batches(TOKENIZER, options, Data(train_text=(str(tmp_path / "text.txt"),), skills=(), rare=1e6), seed=0).text(0)
    assert part.evidence is not None
    asked = part.targets != IGNORE
    assert asked.any()
    assert torch.equal(part.evidence[..., 1] > part.evidence[..., 0], asked)
    for row, place in asked.nonzero().tolist():
        source = int(part.evidence[row, place, 0])
        assert part.ids[row, source - 1 : source + 1].tolist() == part.ids[row, place : place + 2].tolist()
        assert source < place


def test_skills_take_turns() -> None:
    source = SkillSource(TOKENIZER, [("choice", {}), ("knowledge", {})], seed=0)
    assert TOKENIZER.decode(source.step(0).ids[0]).startswith("Question")
    assert not TOKENIZER.decode(source.step(1).ids[0]).startswith("Question")
    assert source.step(0).kind == "skills"


def test_other_skills_are_no_hint_where_to_look() -> None:
    question = make_probe("choice", TOKENIZER).questions(1, 0)[0]
    assert question.evidence is not None
    assert encode_examples(TOKENIZER, [question_example(question)], "examples").evidence is not None
    assert encode_examples(TOKENIZER, [question_example(question)], "skills").evidence is None


def test_words_stand_between_key_and_value_in_training_too() -> None:
    lengths = {
        len(line.split(":")[0].split())
        for i in range(20)
        for line in dictionary_example(random.Random(i), 4, 1, between=3).pieces[0][0].splitlines()[1:5]
    }
    assert lengths == {1, 2, 3, 4}
