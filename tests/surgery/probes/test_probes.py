"""What holds of every probe, and what each asks."""

import hashlib
import json
import random
import re

import pytest

from surgery.errors import UserError
from surgery.probes import make_probe, training_options
from surgery.probes.toy import KEYS, document, facts, is_held_out, key_words
from surgery.probes.toy_tokenizer import build_tokenizer, is_toy_tokenizer
from surgery.records.recipe import Data
from surgery.runtime.listing import list_modules
from surgery.tuning.examples import data_skills, dictionary_example

TOKENIZER = build_tokenizer()
OPTIONS = {
    "kv": {"pairs": 8},
    "mqar": {"pairs": 8},
    "hops": {"pairs": 6},
    "needle": {"length": 120},
    "knowledge": {},
    "choice": {},
}
RETRIEVAL = ("kv", "mqar", "hops", "needle", "choice")  # the evidence's text holds the answer's


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A text with names that come again."""
    rng, folder = random.Random(1), tmp_path_factory.mktemp("text")
    people = [f"{a}{b}" for a in ("Quill", "Marr", "Tovi", "Esk") for b in ("ane", "obb", "uth")]
    words = [f"{rng.choice(people)} {rng.choice(KEYS)} {rng.choice(KEYS)}." for _ in range(900)]
    (folder / "story.txt").write_text(" ".join(words))
    return str(folder / "story.txt")


@pytest.fixture
def probe(request, story):
    options = {"source": story, "tokens": 64, "rare": 1000.0} if request.param == "bigrams" else OPTIONS[request.param]
    return make_probe(request.param, TOKENIZER, **options)


@pytest.mark.parametrize("probe", list_modules("probes", "PROBE"), indirect=True)
def test_a_seed_decides_the_questions(probe):
    first = probe.questions(5, 1)
    assert first == probe.questions(5, 1) != probe.questions(5, 2)
    assert 1 <= len(first) <= 5


@pytest.mark.parametrize("probe", list_modules("probes", "PROBE"), indirect=True)
def test_spans_lie_in_the_prompt_in_order(probe):
    for question in probe.questions(5, 1):
        ends = [0, *(end for span in question.spans for end in span), len(question.prompt)]
        assert ends == sorted(ends)
        assert 0 <= question.answer < len(question.choices) == len(set(question.choices))
        assert question.evidence is None or 0 <= question.evidence < len(question.spans)
        assert question.chance == (1 / len(question.choices) if len(question.choices) > 1 else 0)


@pytest.mark.parametrize("probe", RETRIEVAL, indirect=True)
def test_the_evidence_holds_the_answer(probe):
    for question in probe.questions(20, 3):
        begin, end = question.spans[question.evidence]
        assert question.choices[question.answer].strip() in question.prompt[begin:end]


def test_the_streams_on_which_records_rest():
    """The same texts as version 0.30: with others, its records and checkpoints would mean something else."""
    rng = random.Random(3)
    seen = [document(rng, held_out=held_out) for held_out in (False, True)]
    seen += [sorted(TOKENIZER.get_vocab().items())]
    for name in ("kv", "mqar", "hops", "needle", "knowledge", "choice"):
        asked = make_probe(name, TOKENIZER, **OPTIONS[name]).questions(6, 5)
        seen.append([(q.prompt, q.choices, q.answer, q.spans, q.evidence) for q in asked])
    digest = hashlib.sha256(json.dumps(seen).encode()).hexdigest()
    assert digest == "a30d2f2efacbaf56bfa7b934d4efea54ef1dfd9cc812d4b1ab06d79a0e2663dc"


@pytest.mark.parametrize("name", ["kv", "mqar", "hops"])
@pytest.mark.parametrize("keys", ["seen", "unseen"])
def test_keys_are_those_that_are_asked_for(name, keys):
    for question in make_probe(name, TOKENIZER, **OPTIONS[name] | {"keys": keys}).questions(10, 1):
        firsts = {re.findall(r"\w+", question.prompt[begin:end])[0] for begin, end in question.spans}
        assert firsts <= {*key_words(keys, 1)}
    assert not {*key_words("seen", 1)} & {*key_words("unseen", 1)}


def test_training_asks_nothing_that_is_kept_for_bench():
    assert training_options("kv", {"pairs": 4}) == {"keys": "seen", "pairs": 4}
    assert training_options("choice", {}) == {"part": "tune"}
    assert training_options("kv", {"pairs": 4, "keys": "all"})["keys"] == "all"
    for question in make_probe("choice", part="tune").questions(20, 1):
        assert not is_held_out(question.prompt)
    for question in make_probe("choice", part="bench").questions(20, 1):
        assert is_held_out(question.prompt)
    told = {fact.prompt(template) for fact in facts() for template in fact.templates(held_out=False)}
    assert all(question.prompt in told for question in make_probe("knowledge", part="tune").questions(50, 1))
    assert not any(question.prompt in told for question in make_probe("knowledge").questions(50, 1))


def test_a_file_without_four_choices_gives_no_multiple_choice(tmp_path):
    """And no blank stands where a script has none."""
    file = tmp_path / "facts.jsonl"
    file.write_text("".join(f'{{"prompt": "{name}の首都は", "answer": "{name}市"}}\n' for name in "東西南"))
    assert [name for name, _ in data_skills(Data(facts=str(file)))] == ["knowledge"]
    asked = make_probe("knowledge", source=str(file)).questions(9, 0)
    assert {choice for question in asked for choice in question.choices} == {"東市", "西市", "南市"}


@pytest.mark.parametrize("probe", ["choice", "knowledge"])
def test_a_fact_of_a_file_is_asked_once(probe):
    asked = [question.prompt.partition("\n")[0] for question in make_probe(probe, source="capitals").questions(500, 0)]
    assert len(set(asked)) == len(asked)


def test_parts_of_a_file_share_no_fact():
    tune, bench = (
        {question.prompt for question in make_probe("knowledge", source="capitals", part=part).questions(100, 1)}
        for part in ("tune", "bench")
    )
    assert tune
    assert bench
    assert not tune & bench


@pytest.mark.parametrize("length", [64, 150, 333])
def test_a_needle_has_exactly_its_length(length):
    for question in make_probe("needle", TOKENIZER, length=length, needles=2, queries=2).questions(3, 1):
        assert len(TOKENIZER(question.prompt)["input_ids"]) == length


def test_a_record_keeps_key_and_value_apart():
    """Further than a convolution of four taps reaches; so do options that are long."""
    for question in make_probe("kv", TOKENIZER, pairs=6, between=5).questions(5, 1):
        for begin, end in question.spans:
            assert len(question.prompt[begin:end].split(":")[0].split()) == 6
    for question in make_probe("choice", length="long").questions(5, 1):
        lengths = [len(question.prompt[begin:end].split()) - 1 for begin, end in question.spans]
        assert all(6 <= words <= 12 for words in lengths)


def test_the_value_of_a_joint_key_depends_on_both_words():
    """Each word is in other keys too, in bench as in training."""
    asked = make_probe("kv", TOKENIZER, pairs=16, joint=True).questions(5, 1)
    taught = dictionary_example(random.Random(1), 16, 1, joint=True).pieces[0][0]
    for prompt in (*(question.prompt for question in asked), taught):
        keys = re.findall(r"^(\w+) (\w+):", prompt, re.MULTILINE)
        assert len(set(keys)) == 16
        assert all(sum(word in key for key in keys) > 1 for key in keys for word in key)
        assert re.search(r"key '(\w+) (\w+)'", prompt).groups() in keys


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kw", {}),
        ("kv", {}),
        ("kv", {"pairs": 0}),
        ("kv", {"pairs": 65, "keys": "seen"}),
        ("kv", {"pairs": 4, "joint": "yes"}),
        ("kv", {"pairs": "8"}),
        ("kv", {"pears": 8}),
        ("kv", {"pairs": 8, "keys": "some"}),
        ("mqar", {"pairs": 4, "queries": 5}),
        ("hops", {"pairs": 0}),
        ("kv", {"pairs": 4, "between": -1}),
        ("needle", {"length": 100, "depth": 2.0}),
        ("needle", {"length": 100, "depth": float("nan")}),
        ("bigrams", {"source": ""}),
        ("bigrams", {"source": "a.txt", "elsewhere": "a.txt"}),
        ("choice", {"source": "capitals", "length": "longer"}),
    ],
)
def test_options_that_do_not_fit_are_refused(name, options):
    with pytest.raises(UserError, match=f"{name}|different words"):
        make_probe(name, TOKENIZER, **options)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "no json",
        '{"prompt": "p"}',
        '{"prompt": "p", "answer": " "}',
        '{"prompt": "p", "answer": "a"}',
        '{"prompt": "p", "answer": "a", "choices": ["b", "c"]}',
        '{"prompt": "p", "answer": "a", "choices": ["a", " a"]}',
    ],
)
def test_files_that_hold_no_facts_are_refused(tmp_path, text):
    (tmp_path / "facts.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"facts\.jsonl"):
        make_probe("knowledge", source=str(tmp_path / "facts.jsonl")).questions(3, 0)


def test_a_needle_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="needle"):
        make_probe("needle", TOKENIZER, length=8).questions(1, 0)
    with pytest.raises(UserError, match="tokenizer"):
        make_probe("needle", length=100)


def test_the_toy_tokenizer_is_known():
    assert is_toy_tokenizer(TOKENIZER)
    assert all(len(TOKENIZER.tokenize(f":{number}")) == 2 for number in range(100))
    assert all(len(TOKENIZER.tokenize(word)) == len(TOKENIZER.tokenize(f" {word}")) == 1 for word in KEYS)
