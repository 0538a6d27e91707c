"""The other retrieval probes: right by an independent reading of their prompts, completions judged as greedy decoding would."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.evaluation.contexts import readable
from surgery.jobs.preparing import check
from surgery.probes import make, probes
from surgery.probes.question import Completion, CompletionProbe, Passage, PassageProbe, Question, WritingProbe
from surgery.probes.scoring import answer, complete
from surgery.records.recipe import Bench, Recipe
from surgery.world.tokenizer import build_tokenizer
from surgery.world.words import KEYS
from tests.models import SAME, random_base

README = str(Path(__file__).parents[2] / "README.md")
# Of every probe, options that fit.
OPTIONS = {
    "kv": {"pairs": 8},
    "knowledge": {},
    "letters": {},
    "mqar": {"pairs": 8, "queries": 4},
    "phonebook": {"entries": 8},
    "copying": {"length": 8},
    "selective_copying": {"count": 4, "length": 12},
    "needle": {"length": 120, "depth": 0.5},
    "recall": {"source": README, "words": 128, "rare": 1000.0},
    "ruler": {"task": "niah_single_1", "length": 900},
    "two_hops": {"pairs": 8},
    "hits": {"source": README, "tokens": 128, "rare": 1000.0},
}

seeds = st.integers(0, 10**9)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and a token before the text."""
    vocabulary = {"<s>": 0, "?": 1, "\n": 2} | {chr(i): i for i in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", bos_token="<s>")


@pytest.fixture(scope="module", params=[build_tokenizer, character_tokenizer], ids=lambda f: f.__name__)
def tokenizer(request) -> PreTrainedTokenizerFast:
    return request.param()


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    return character_tokenizer()


def ask(probe, n: int, seed: int) -> list:
    if isinstance(probe, PassageProbe):
        return probe.passages(n, seed)
    if isinstance(probe, WritingProbe):
        return probe.writings(n, seed)
    return probe.completions(n, seed) if isinstance(probe, CompletionProbe) else probe.questions(n, seed)


def test_probes_are_found_by_listing_the_folder():
    assert set(probes()) == set(OPTIONS), "a new probe needs options here"


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_asked_follows_from_the_seed(name, characters):
    probe = make(name, tokenizer=characters, **OPTIONS[name])
    assert ask(probe, 5, seed=1) == ask(make(name, tokenizer=characters, **OPTIONS[name]), 5, seed=1)
    assert ask(probe, 5, seed=1) != ask(probe, 5, seed=2)
    assert len(set(ask(probe, 5, seed=1))) == 5
    for item in ask(probe, 20, seed=3):
        if isinstance(item, Passage):
            assert all(before < place < len(item.ids) for place, before in item.hits)
            continue
        assert not item.prompt.endswith(" ")
        if isinstance(item, Question):
            assert 0 <= item.answer < len(item.choices) == len(set(item.choices))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kvs", {}, "no probe is named 'kvs'; did you mean kv?"),
        ("kv", {}, "needs the option 'pairs'"),
        ("kv", {"pears": 3}, "no option 'pears'; its options are pairs"),
        ("kv", {"pairs": "many"}, "option 'pairs' is 'many'; input should be a valid integer"),
        ("kv", {"pairs": 101}, "1 to 100 pairs, not 101"),
        ("mqar", {"pairs": 4, "queries": 5}, "1 to 4 queries, not 5"),
        ("phonebook", {"entries": 2}, "entries, not 2"),
        ("copying", {"length": 1}, "at least 2 words, not 1"),
        ("selective_copying", {"count": 8, "length": 7}, "at least its count 8, not 7"),
        ("needle", {"length": 99, "needles": 33}, "1 to 32 needles, not 33"),
        ("needle", {"length": 99, "needles": 3, "queries": 4}, "3 needles take 1 to 3 queries, not 4"),
        ("needle", {"length": 99, "depth": math.nan}, "from 0 to 1, not nan"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(name, options, message, characters):
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        make(name, tokenizer=characters, **options)
    assert "\n" not in str(refused.value)


def test_only_what_counts_tokens_needs_a_tokenizer():
    for name in ("needle", "hits", "ruler"):
        with pytest.raises(UserError, match=f"the probe '{name}' needs a tokenizer"):
            make(name, **OPTIONS[name])
    assert all(make(name, **options) for name, options in OPTIONS.items() if name not in ("needle", "hits", "ruler"))


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 64), seeds)
def test_mqar_asks_for_what_the_pairs_say(data, pairs, seed):
    queries = data.draw(st.integers(1, pairs))
    question = make("mqar", pairs=pairs, queries=queries).questions(1, seed)[0]
    dictionary, asked = question.prompt.split("\n\n")
    table = dict(line.split(" ") for line in dictionary.split("\n"))
    *earlier, last = asked.split("\n")
    assert len(table) == pairs
    assert len(earlier) == queries - 1
    assert not set(table) & set(table.values())
    assert all(table[key] == value for key, value in (line.split(" ") for line in earlier))
    assert last not in {line.split(" ")[0] for line in earlier}  # its answer is not to be had from an earlier one
    assert question.choices == tuple(f" {value}" for value in table.values())
    assert question.choices[question.answer] == f" {table[last]}"
    spanned = [question.prompt[begin:end] for begin, end in question.spans]
    assert spanned == [f"{key} {value}\n" for key, value in table.items()]
    assert spanned[question.evidence].startswith(f"{last} ")


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 200), seeds)
def test_the_phone_book_has_the_number_that_is_asked_for(entries, seed):
    question = make("phonebook", entries=entries).questions(1, seed)[0]
    book, examples, asked = question.prompt.split("\n\n")
    table = dict(line.split(": ") for line in book.split("\n"))
    shown = dict(line.split(": ") for line in examples.split("\n"))
    assert len(table) == len(set(table.values())) == entries
    assert all(re.fullmatch(r"[6-9]\d{9}", number) for number in table.values())
    assert len(shown) == 2
    assert shown.items() <= table.items()
    assert asked.endswith(":")
    assert asked[:-1] not in shown
    assert question.choices == tuple(f" {number}" for number in table.values())
    assert question.choices[question.answer] == f" {table[asked[:-1]]}"
    spanned = [question.prompt[begin:end] for begin, end in question.spans]
    assert spanned == [f"{name}: {number}\n" for name, number in table.items()]
    assert spanned[question.evidence].startswith(asked)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 300), st.integers(1, 3), seeds)
def test_a_copy_is_the_string_again(length, shown, seed):
    item = make("copying", length=length, shown=shown).completions(1, seed)[0]
    *strings, copy = (item.prompt + item.answer).split("\n\n")
    assert len(strings) == shown
    assert set(strings) == {copy}
    assert len(copy.split(" ")) == length
    assert set(copy.split(" ")) <= set(KEYS)
    assert item.prompt.split("\n\n")[-1] == copy.split(" ")[0]


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 64), seeds)
def test_a_selective_copy_is_the_words_that_are_no_noise(data, count, seed):
    length = data.draw(st.integers(count, 200))
    item = make("selective_copying", count=count, length=length).completions(1, seed)[0]
    example, asked = (item.prompt + item.answer).split("\n\n")
    found = []
    for task in (example, asked):
        text, solution = task.removeprefix("Text: ").split("\nNouns: ")
        assert len(text.split(" ")) == length
        assert [word for word in text.split(" ") if word in KEYS] == solution.split(" ")
        assert len(set(solution.split(" "))) == count
        found.append(set(solution.split(" ")))
    assert not found[0] & found[1]
    assert item.prompt.endswith("\nNouns:")


@pytest.mark.parametrize("name", ["copying", "selective_copying"])
def test_an_answer_continues_the_prompt_at_a_words_edge(name, tokenizer):
    """Tokenised by itself it is what it is in one text with the prompt."""
    for item in make(name, **OPTIONS[name]).completions(20, seed=0):
        prompt, following = (
            tokenizer(text, add_special_tokens=i == 0)["input_ids"] for i, text in enumerate((item.prompt, item.answer))
        )
        assert tokenizer(item.prompt + item.answer)["input_ids"] == prompt + following


def read_needle(question: Question) -> tuple[str, str, str]:
    """(what is before the needle, its number, what is after it), by a reading of the prompt."""
    text, asked = question.prompt.rsplit("\n", 1)
    word = re.fullmatch(r"The secret number of (\w+) is", asked)[1]
    before, number, after = re.fullmatch(rf"(.*?) ?The secret number of {word} is (\d\d)\. ?(.*)", text).groups()
    return before, number, after


@pytest.mark.parametrize("depth", [0, 0.3, 1])
@pytest.mark.parametrize("length", [40, 400])
def test_a_needles_prompt_has_the_tokens_asked_for(length, depth, tokenizer):
    length *= 4 if tokenizer.vocab_size < 200 else 1  # characters
    for question in make("needle", tokenizer=tokenizer, length=length, depth=depth).questions(3, seed=length):
        assert len(tokenizer(question.prompt)["input_ids"]) == length
        before, number, after = read_needle(question)
        assert question.choices[question.answer] == f" {number}"
        assert len(set(question.choices)) == 10
        [(begin, end)] = question.spans
        assert question.prompt[begin:end].endswith(f"is {number}.")
        assert question.prompt[:begin].strip() == before
        assert question.evidence == 0
        assert before == "" or before.endswith(".") or depth == 1
        words = [len(part.split()) for part in (before, after)]
        assert words[0] == depth * sum(words) or 0 < depth < 1
        assert abs(words[0] - depth * sum(words)) < 15  # a sentence has fewer words


@settings(max_examples=20, deadline=None)
@given(length=st.integers(150, 700), depth=st.floats(0, 1), seed=seeds)
@example(length=378, depth=0.4962328412463718, seed=464654)
@example(length=160, depth=0.5374763183409071, seed=966138)
def test_a_needles_prompt_is_exact_at_any_length(length, depth, seed, characters):
    question = make("needle", tokenizer=characters, length=length, depth=depth).questions(1, seed)[0]
    assert len(characters(question.prompt)["input_ids"]) == length


@pytest.mark.parametrize(("needles", "queries"), [(2, 2), (8, 1), (8, 4), (32, 3)])
def test_one_of_several_needles_is_asked_for(needles, queries, tokenizer):
    length = 4000 if tokenizer.vocab_size < 200 else 1200  # characters
    told = r"The secret number of (\w+) is (\d\d)\."
    for question in make("needle", tokenizer=tokenizer, length=length, needles=needles, queries=queries).questions(3, seed=1):
        assert len(tokenizer(question.prompt)["input_ids"]) == length
        haystack, *before, last = question.prompt.split("\n")
        pairs = dict(re.findall(told, haystack))
        assert len(pairs) == len(set(pairs.values())) == needles
        asked = [re.fullmatch(told, line).groups() for line in before]
        assert len({word for word, _ in asked}) == queries - 1
        assert all(pairs[word] == number for word, number in asked)
        word = re.fullmatch(r"The secret number of (\w+) is", last)[1]
        assert word not in dict(asked)
        assert question.choices[question.answer] == f" {pairs[word]}"
        assert {f" {number}" for number in pairs.values()} <= set(question.choices)
        assert len(set(question.choices)) == max(10, needles)
        assert [haystack[begin:end] for begin, end in question.spans] == [m[0] for m in re.finditer(told, haystack)]
        begin, end = question.spans[question.evidence]
        assert question.prompt[begin:end] == f"The secret number of {word} is {pairs[word]}."
        middles = [(begin + end) / 2 / len(haystack) for begin, end in question.spans]
        assert all(abs(middle - (i + 0.5) / needles) < 0.1 for i, middle in enumerate(middles))


def test_a_needle_in_a_file(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"Chapter {i}. It was the best of times;\tit was the worst of times." for i in range(200)))
    questions = make("needle", tokenizer=tokenizer, length=300, source=str(path)).questions(5, seed=0)
    assert {len(tokenizer(question.prompt)["input_ids"]) for question in questions} == {300}
    assert len({read_needle(question)[0] for question in questions}) == 5  # stretches from different places
    assert all(question.choices[question.answer] == f" {read_needle(question)[1]}" for question in questions)


def test_a_needle_that_cannot_be_exact_is_shorter(characters, tmp_path):
    """Words of four characters and a space: not every length can be had."""
    (tmp_path / "text.txt").write_text("word " * 500)
    probe = make("needle", tokenizer=characters, length=302, source=str(tmp_path / "text.txt"))
    assert 302 - 5 < len(characters(probe.questions(1, seed=0)[0].prompt)["input_ids"]) < 302


@pytest.mark.parametrize(("needles", "lengths"), [(1, range(60, 76, 4)), (3, range(125, 165, 8))])
def test_a_check_refuses_what_the_questions_refuse_and_nothing_else(needles, lengths, characters, tmp_path):
    """From lengths at which no question fits, through those at which some do, to one that the text cannot fill."""
    (tmp_path / "short.txt").write_text("It was short. " * 30)
    said = set()
    for source, lengths_of in (("world", lengths), (tmp_path / "short.txt", (300, 560))):
        for length in lengths_of:
            needle = make("needle", tokenizer=characters, length=length, needles=needles, source=str(source))
            checked = refusal(lambda needle=needle: needle.check(5, seed=0))
            assert refusal(lambda needle=needle: needle.questions(5, seed=0)) == checked
            said.add(checked)
    assert len(said) > 3
    assert "" in said
    assert any("needs more" in line for line in said)


def refusal(work) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


def test_a_length_that_bench_could_not_ask_is_refused_before_the_work_begins(tiny):
    with pytest.raises(UserError, match=r"bench, needles\.64: a needle of 64 tokens is too short: the question alone has \d+"):
        check(Recipe(model="tiny", bench=Bench(suites=("length",), contexts=(64, 100_000))), tiny)


def test_a_bench_with_nothing_to_measure_is_refused(tiny):
    with pytest.raises(UserError, match=r"nothing is left to measure: hits \(bench.suites\) needs lengths in"):
        check(Recipe(model="tiny", bench=Bench(suites=("hits",), contexts=())), tiny)


def test_lengths_beyond_the_tokenizer_s_are_measured_where_they_are_given(tiny, capsys):
    def said(**options):
        check(Recipe(model="tiny", bench=(bench := Bench(windows=2, **options))), tiny)
        return readable(bench, tiny.tokenizer), capsys.readouterr().err

    assert said(suites=("speed",), contexts=(512, 4096)) == (
        [512, 4096],
        "warning: bench.contexts 4,096: the tokenizer's model_max_length is 2,048; models may not know such lengths\n",
    )
    assert said(suites=("speed",)) == (
        [256, 1024],
        "not measured: 4,096 tokens, of the default bench.contexts; the tokenizer's model_max_length is 2,048\n",
    )
    assert said(suites=("language",), contexts=(4096,))[1] == ""


class Indifferent:
    """A model to which all 128 tokens are equally likely."""

    device = torch.device("cpu")
    base_model = property(lambda self: self)

    def __call__(self, input_ids, use_cache, logits_to_keep):
        return SimpleNamespace(logits=torch.zeros(len(input_ids), len(logits_to_keep), 128))


@pytest.mark.parametrize(
    ("name", "options", "chance"),
    [("phonebook", {"entries": 5}, 1 / 5), ("needle", {"length": 150}, 1 / 10)],
)
def test_chance_is_what_the_probe_says(name, options, chance, characters):
    """Without a preference the first of the shortest choices is taken, and the right one stands there as often as any."""
    questions = make(name, tokenizer=characters, **options).questions(100, seed=0)
    result = answer(Indifferent(), characters, questions)
    assert abs(result.correct.mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / 100)
    np.testing.assert_allclose(result.loss, -math.log(chance), rtol=1e-4)
    assert {question.answer for question in questions} == set(range(len(questions[0].choices)))


@pytest.mark.usefixtures("in_float64")
@settings(max_examples=15, deadline=None)
@given(
    prompts=st.lists(st.text("abcdefgh ", max_size=30).map(lambda text: f"{text}a"), min_size=1, max_size=5),
    tokens=st.integers(1, 6),
    spoil=st.integers(0, 11),
    batch_size=st.integers(1, 5),
)
def test_completing_in_batches_equals_decoding_one_by_one(prompts, tokens, spoil, batch_size, characters):
    """`spoil`: the place of a wrong token, if there are as many."""
    items, wanted, model = [], [], random_base(vocab_size=128).double()
    with torch.inference_mode():
        for prompt in prompts:
            ids = characters(prompt)["input_ids"]
            written: list[int] = []
            for _ in range(tokens):
                logits = model(torch.tensor([ids + written])).logits[0, -1]
                logits[:32] = -torch.inf  # no text has these tokens
                logits[127] = -torch.inf
                written.append(int(logits.argmax()))
            if spoil < tokens:
                written[spoil] = ord("z") if written[spoil] != ord("z") else ord("y")
            items.append(Completion(prompt, "".join(map(chr, written))))
            log_p = model(torch.tensor([ids + written])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
            chosen = log_p[torch.arange(tokens), torch.tensor(written)]
            wanted.append((bool((chosen == log_p.amax(-1)).all()), -chosen.mean().item()))
    result = complete(model, characters, items, batch_size=batch_size)
    assert result.correct.tolist() == [correct for correct, _ in wanted]
    np.testing.assert_allclose(result.loss, [loss for _, loss in wanted], **SAME)


@pytest.mark.usefixtures("in_float64")
def test_candidates_of_many_tokens_are_scored_a_few_rows_at_a_time(characters):
    """Batches do not grow with the candidates' tokens, and do not change what is measured."""
    questions, seen = make("phonebook", entries=3).questions(4, seed=0), []
    model = random_base(vocab_size=128).double()

    model.register_forward_pre_hook(lambda module, given, named: seen.append(len(named["input_ids"])), with_kwargs=True)
    small, large = (answer(model, characters, questions, batch_size=size) for size in (2, 500))
    assert seen == [2, 1] * 4 + [12]  # of every question three rows, one a candidate; the shorter ones are read off them
    assert np.array_equal(small.correct, large.correct)
    np.testing.assert_allclose(small.loss, large.loss, **SAME)
