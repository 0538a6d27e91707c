"""RULER's prompts, answers and scores are those of lm-evaluation-harness, and of the definition."""

import random
import sys
from dataclasses import replace
from functools import partial
from importlib import machinery, metadata
from types import ModuleType

import pytest

import surgery
from surgery.errors import UserError
from surgery.more.probes import ruler
from surgery.more.probes.ruler import WRITTEN
from surgery.probes import make
from surgery.probes.kv import KVRetrieval
from surgery.probes.question import Writing
from surgery.probes.written import Texts, batches, write, write_shapes
from surgery.records.plan import Plan
from tests.models import TINY
from tools.ruler_check import harness_examples, prompt_of

ADJECTIVES, NOUNS, VERBS = (
    [f"{one}{two}{kind}" for one in ("bo", "da", "fi", "gu", "ke", "la", "mi") for two in ("ra", "se", "ti", "vo", "zu")]
    for kind in ("c", "n", "b")
)
TEXT = " ".join(f"The {noun} of {verb} is {adjective}." for noun in NOUNS for verb in VERBS for adjective in ADJECTIVES[:9])


@pytest.fixture
def words(monkeypatch):
    """wonderwords with few words, so that nothing has to be installed, and reading millions of them takes no time."""
    stub = ModuleType("wonderwords")

    class RandomWord:
        _categories = {"noun": NOUNS, "adjective": ADJECTIVES, "verb": VERBS}
        _categories |= {"nouns": NOUNS, "adjectives": ADJECTIVES, "verbs": VERBS}

    stub.RandomWord = RandomWord
    stub.__spec__ = machinery.ModuleSpec("wonderwords", None)
    monkeypatch.setitem(sys.modules, "wonderwords", stub)
    for known in (ruler._compounds, ruler._single):
        known.cache_clear()
    yield
    for known in (ruler._compounds, ruler._single):
        known.cache_clear()


@pytest.fixture
def harness(words, monkeypatch, tokenizer):
    """The harness's own generators: (task, length) -> examples, as they are when a process begins."""
    pytest.importorskip("lm_eval")
    nltk = ModuleType("nltk")
    nltk.data = ModuleType("data")
    nltk.data.find, nltk.sent_tokenize = (lambda name: name), (lambda text: ruler._sentences(text.split()))
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9" if name == "nltk" else version(name))
    return partial(harness_examples, tokenizer, TEXT.split())


@pytest.mark.parametrize("task", WRITTEN)
def test_every_example_is_the_harness_s(task, harness, tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    for length in (2048, 4096):
        if length < ruler.LONG and (task == "ruler_vt" or "essay" in str(ruler.MAGIC.get(task))):
            continue  # the harness finds no end, or leaves the text out
        theirs = harness(task, length, 7, 3)
        source = str(tmp_path / "text.txt")
        probe = make("ruler", tokenizer=tokenizer, task=task, length=length, source=source, words="wonderwords")
        ours = probe.writings(3, 7)
        assert [each.prompt for each in ours] == [prompt_of(doc, task) for doc in theirs]
        assert [[*each.answers] for each in ours] == [doc["outputs"] for doc in theirs]


@pytest.mark.parametrize("written", ["The Answer is ABCDE, then fghij.", "abcd", " ABCDEFGHIJ\n", ""])
def test_the_score_is_the_harness_s(written, harness, tokenizer):
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    texts = Texts(tokenizer, [("abcde", "FGHIJ")], 1)
    ids = tokenizer(f"{written}<|endoftext|>", return_tensors="pt")["input_ids"]
    texts(ids.new_zeros(1, 1).new_tensor([[0, *ids[0].tolist()]]), None)
    assert texts.shares.tolist() == [string_match_all(postprocess_pred([written]), [["abcde", "FGHIJ"]])]


@pytest.mark.parametrize("hops", [1, 4])
def test_a_chain_of_variables_leads_from_each_answer_to_the_next(tokenizer, hops):
    (one,) = make("ruler", tokenizer=tokenizer, task="ruler_vt", length=4096, hops=hops).writings(1, 3)
    example, question = one.prompt.split("\n\n\n\n")
    value = question.rsplit("the value ", 1)[1].split(",")[0]
    assert len(one.answers) == hops + 1 == len(example.split("they are:")[1].split())
    for name, before in zip(one.answers, [value, *(f"VAR {name}" for name in one.answers)], strict=False):
        assert question.count(f"VAR {name} = {before}") == 1


def test_what_does_not_fit_is_not_asked(tokenizer, tmp_path):
    for task in WRITTEN:
        assert make("ruler", tokenizer=tokenizer, task=task, length=150).writings(2, 0) == []
    (tmp_path / "text.txt").write_text("A few words.")
    with pytest.raises(UserError, match=r"has 3 words; niah_single_2 of 1,024 tokens needs more"):
        make("ruler", tokenizer=tokenizer, task="niah_single_2", length=1024, source=str(tmp_path / "text.txt")).writings(1, 0)
    for wrong in ({"task": "niah"}, {"task": "ruler_vt", "hops": 11}, {"task": "ruler_vt", "length": 0}):
        with pytest.raises(UserError):
            make("ruler", tokenizer=tokenizer, **{"length": 512} | wrong)


@pytest.fixture(scope="module")
def asked():
    """Some that the model can answer, and another answer that it does not give."""
    questions = KVRetrieval(pairs=4).questions(6, 0)
    return [Writing(q.prompt[i:], (q.choices[q.answer], "nothing"), 5 + i % 2) for i, q in enumerate(questions)]


def test_scores_are_the_harness_s_and_do_not_depend_on_the_batch(asked):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tiny = surgery.load(TINY)
    asker = HFLM(pretrained=tiny.model, tokenizer=tiny.tokenizer, backend="causal", batch_size=1)
    kinds = [{"until": [], "max_gen_toks": each.tokens, "do_sample": False, "temperature": 0.0} for each in asked]
    pairs = list(zip(asked, kinds, strict=True))
    requests = [Instance("generate_until", {}, (each.prompt, kind), i) for i, (each, kind) in enumerate(pairs)]
    texts = asker.generate_until(requests, disable_tqdm=True)
    theirs = [sum(a.lower() in t.lower() for a in each.answers) / 2 for each, t in zip(asked, texts, strict=True)]
    assert 0.5 in theirs
    for tokens in (1, 10_000):
        assert write(tiny.model, tiny.tokenizer, asked, tokens).tolist() == theirs


def test_batches_hold_so_many_tokens(asked, tokenizer):
    assert sorted(i for chosen, _ in batches(tokenizer, asked, 100) for i in chosen) == list(range(6))
    for chosen, rows in batches(tokenizer, asked, 100):
        assert len(rows) == 1 or len(rows) * max(map(len, rows)) <= 100
        assert len({asked[i].tokens for i in chosen}) == 1
    shapes = write_shapes(tokenizer, asked, 100)
    assert sum(rows for rows, tokens in shapes if tokens == 1) == sum(each.tokens - 1 for each in asked)


@pytest.mark.slow  # reads all tasks of the harness, and prompts of 4,096 tokens, the shortest that it reports
def test_decisions_are_those_of_the_command_on_the_exported_folder(harness, tmp_path, monkeypatch):
    """With the same prompts. Of numbers of one digit, which a model that knows nothing writes here and there."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.ruler import prepare_niah

    digit = ruler.Ruler._drawn
    monkeypatch.setattr(prepare_niah, "generate_random_number", lambda: str(random.randint(0, 9)))
    monkeypatch.setattr(
        ruler.Ruler, "_drawn", lambda self, rng, kind: str(rng.randint(0, 9)) if kind == "numbers" else digit(self, rng, kind)
    )
    base = surgery.load(TINY)
    hybrid = surgery.splice(base, plan := Plan(sites=("L0.H3,5",)))
    surgery.export(hybrid, tmp_path / "hybrid", tokenizer=base.tokenizer, plan=plan, base="tiny")
    probe = make("ruler", tokenizer=base.tokenizer, task="niah_single_1", length=4096, words="wonderwords")
    monkeypatch.setattr(evaluator, "add_env_info", lambda _: None)  # lists all packages, for seconds
    folder = str(tmp_path / "hybrid")
    said = evaluator.simple_evaluate(  # without max_length it cuts prompts to the tokenizer's model_max_length
        "hf", f"pretrained={folder},max_length=8192", ["niah_single_1"], batch_size=2, device="cpu", bootstrap_iters=0, limit=6,
        random_seed=probe.name(7), numpy_random_seed=7, task_manager=TaskManager(metadata={"tokenizer": folder}),
    )["samples"]["niah_single_1"]  # fmt: skip
    asked = probe.writings(6, 7)
    assert [each.prompt for each in asked] == [prompt_of(sample["doc"], "niah_single_1") for sample in said]
    ours = write(hybrid, base.tokenizer, asked, 10_000).tolist()
    assert ours == [sample["4096"] for sample in said]
    written = [sample["resps"][0][0].strip() for sample in said]  # this model finds no needle: so its words are compared, too
    assert all(written)
    assert write(hybrid, base.tokenizer, [replace(each, answers=(text,)) for each, text in zip(asked, written, strict=True)],
                 10_000).tolist() == [1.0] * len(asked)  # fmt: skip
