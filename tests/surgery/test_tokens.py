"""What follows a prompt: cut from the tokens of the whole text, as lm-evaluation-harness does, with every kind of tokenizer."""

import json
import random
from functools import cache

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.evaluation import suites
from surgery.evaluation.task import bench_seed
from surgery.exporting.export import export
from surgery.models import tokens
from surgery.pretraining.lessons import letter_pieces
from surgery.probes import make
from surgery.probes.encoded import encode
from surgery.probes.perplexity import TextWindows
from surgery.probes.question import Completion, Question
from surgery.probes.scoring import complete
from surgery.records.plan import Plan
from surgery.records.recipe import Bench, Data
from surgery.splicing.splice import splice
from surgery.tuning.sequences import IGNORE, collate, kv_pieces, probe_pieces
from surgery.tuning.text_sources import Reading, World
from surgery.world.text import document
from surgery.world.tokenizer import build_tokenizer
from tests.models import ROOT, but_slow, float64, random_base

NEOX = ROOT.parent / "shared" / "data" / "gpt-neox-tokenizer" / "20B_tokenizer.json"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
ALPHABET = [*map(chr, range(33, 127)), "▁"]


def corpus() -> list[str]:
    """Lines, as SentencePiece is trained on."""
    rng = random.Random(0)
    prompts = [q.prompt for q in make("kv", pairs=8).questions(60, seed=1)]
    return [line for text in prompts for line in text.split("\n")] + [document(rng, held_out=False) for _ in range(60)]


def pre_tokenizer(words: bool = True) -> pre_tokenizers.PreTokenizer:
    """As Llama's vocabulary was made: every digit is a piece. words: none joins two words."""
    return pre_tokenizers.Sequence([pre_tokenizers.Metaspace(split=words), pre_tokenizers.Digits(individual_digits=True)])


def pieces(words: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary with bytes, and its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(words)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=ALPHABET, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *BYTES])}
    for word in sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get):
        vocabulary.setdefault(word, len(vocabulary))
    return vocabulary, merges


def llama(*, words: bool = True, first: tuple[tuple[str, str], ...] = (), **fields) -> PreTrainedTokenizerBase:
    """first: merges that come before all others."""
    vocabulary, merges = pieces(words)
    for pair in first:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    return LlamaTokenizer(vocab=vocabulary, merges=[*first, *merges], **fields)


def legacy() -> PreTrainedTokenizerBase:
    """As older tokenizer.json files of Llama's have it: normalised, and not cut into words."""
    vocabulary, merges = pieces(True)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=[*SPECIAL, *BYTES], unk_token="<unk>", initial_alphabet=ALPHABET, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def neox() -> PreTrainedTokenizerBase:
    if not NEOX.exists():
        pytest.skip(f"needs {NEOX.name}")
    return PreTrainedTokenizerFast(tokenizer_file=str(NEOX), eos_token="<|endoftext|>")  # no pad token


def characters() -> PreTrainedTokenizerBase:
    """One token a character, and no special token at all."""
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(32, 127)} | {"\n": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KIT = {
    "byte-level": build_tokenizer,
    "neox": neox,
    "llama": llama,
    "llama with bos": lambda: llama(add_bos_token=True),
    "llama with bos and eos": lambda: llama(add_bos_token=True, add_eos_token=True),
    "llama with eos": lambda: llama(add_bos_token=False, add_eos_token=True),
    "llama, legacy": legacy,
    "llama, pieces of several words": lambda: llama(words=False),
    "llama, pieces across the border": lambda: llama(first=tuple(zip("ssss:", "13579A", strict=False))),
    "unigram": unigram,
    "characters": characters,
}
PROBES = [
    make("kv", pairs=6), make("mqar", pairs=8), make("phonebook", entries=4), make("letters"),
    make("knowledge", source="capitals"),
]  # fmt: skip


@cache
def kit(name: str) -> PreTrainedTokenizerBase:
    return KIT[name]()


@pytest.fixture(params=KIT)
def tokenizer(request) -> PreTrainedTokenizerBase:
    return kit(request.param)


def whole(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str) -> tuple[list[int], list[int]]:
    """What the harness makes of a pair, by a tokenizer that appends nothing."""
    return asker(tokenizer)._encode_pair(prompt, text)


@cache
def asker(tokenizer: PreTrainedTokenizerBase):
    pytest.importorskip("lm_eval", reason="needs the extra 'eval' (lm-evaluation-harness)")
    from lm_eval.models.huggingface import HFLM

    asker = object.__new__(HFLM)
    asker.tokenizer, asker.backend, asker.add_bos_token = tokens.prompting(tokenizer), "causal", None
    asker.custom_prefix_token_id = None if tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None else 5
    return asker


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: type(probe).__name__)
def test_candidates_are_the_harness_s(tokenizer, probe):
    """Row by row, and token by token."""
    questions = probe.questions(4, seed=3)
    encoded = encode(tokenizer, questions)
    scored: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
    for q, c, row, token in encoded.terms.tolist():
        scored.setdefault((q, c), []).append((encoded.rows[row], token))
    for q, question in enumerate(questions):
        for c, choice in enumerate(question.choices):
            prompt, ids = whole(tokenizer, question.prompt, choice)
            assert scored[q, c] == [([*prompt, *ids[:i]], token) for i, token in enumerate(ids)]
        assert len(encoded.rows) == len({tuple(row) for row in encoded.rows})  # candidates share rows


def test_text_reads_as_it_stands(tokenizer):
    """Prompt and candidate together are the tokens of the text, where no token crosses the border."""
    for question in make("kv", pairs=5).questions(20, seed=0):
        pair = question.prompt, question.choices[question.answer]
        (prompt,), (ids,) = tokens.encode_prompts(tokenizer, pair[:1]), tokens.encode_continuations(tokenizer, [pair])
        (text,) = tokens.encode_prompts(tokenizer, ["".join(pair)])
        if text[: len(prompt)] == prompt:
            assert [*prompt, *ids] == text
        assert len(prompt) + len(ids) == len(text)


def test_lessons_train_what_probes_score(tokenizer):
    lessons = [kv_pieces(random.Random(i), 6, 3) for i in range(3)] + [letter_pieces(random.Random(i), 3) for i in range(3)]
    lessons += [probe_pieces(probe, seed) for probe in PROBES for seed in range(2)]
    lessons.append([("The value is ", False), ("31", True), ("\nand that is \n", False), ("7", True)])
    ids, targets = collate(tokenizer, lessons)
    for row, marked, lesson in zip(ids.tolist(), targets.tolist(), lessons, strict=True):
        expected, predicted, before = [], [], ""
        for text, is_target in lesson:
            if before:
                following = whole(tokenizer, before, text if is_target else text.rstrip())[1]
            else:
                following = whole(tokenizer, text, "")[0]
            expected += following
            predicted += following if is_target else [IGNORE] * len(following)
            before += text
        filled = len(row) - len(expected)
        assert row == expected + [0] * filled
        assert marked == predicted[1:] + [IGNORE] * (filled + 1)


WORDS = "the|key|'bell'|is|a.|(x)|31|42nd|don't|-|ü|日本|é|e.g.,|12:30|\n|\n\n|\t|  ".split("|")


def test_a_prompt_s_beginning_is_left_out_where_that_changes_nothing(tokenizer):
    """Random texts, cut anywhere: equal to the whole."""
    rng, shortened = random.Random(5), 0
    for _ in range(300):
        text = "".join(rng.choice(WORDS) + rng.choice([" ", " ", " ", "", ":"]) for _ in range(rng.randint(2, 14)))
        place = rng.randrange(1, len(text))
        prompt, rest = tokens.divided(text[:place], text[place:])
        shortened += tokens._tail(prompt) != prompt
        both, alone = tokenizer([prompt + rest, prompt], add_special_tokens=False)["input_ids"]
        assert tokens.encode_continuations(tokenizer, [(prompt, rest)]) == [both[len(alone) :]], (prompt, rest)
    assert shortened > 50


def test_of_which_tokenizers_the_whole_is_taken():
    """Where an entry of the vocabulary joins words, and where the model is none that merges or chooses entries."""
    assert {name for name in {*KIT} - {"neox"} if not tokens._is_local(kit(name))} == {
        "characters",
        "llama, pieces of several words",
    }


def test_a_tokenizer_that_learns_a_word_is_looked_at_again():
    """Here one that joins two words, over the place where prompts are cut."""
    tokenizer = build_tokenizer()
    pairs = [("a b c is", " 31"), ("The 'anchor' key is", " 7")]
    assert tokens._is_local(tokenizer)
    tokens.encode_continuations(tokenizer, pairs)
    tokenizer.add_tokens(["key is"])
    assert not tokens._is_local(tokenizer)
    for (prompt, text), ids in zip(pairs, tokens.encode_continuations(tokenizer, pairs), strict=True):
        behind = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        assert ids == tokenizer(prompt + text, add_special_tokens=False)["input_ids"][behind:]


def test_a_tokenizer_that_cuts_by_what_stands_far_before_gets_the_whole():
    """No entry of its vocabulary crosses a space; but where it cuts depends on where the text begins."""
    vocabulary = {character: i for i, character in enumerate(map(chr, range(32, 127)))} | {"\n": 95, "31": 96}
    joining = Tokenizer(models.BPE(vocab=vocabulary, merges=[("3", "1")], unk_token="?"))
    assert tokens._is_local(PreTrainedTokenizerFast(tokenizer_object=joining))
    joining.pre_tokenizer = pre_tokenizers.Split(Regex(r"\A(?m:.{13})"), "isolated")  # a tail is 12 characters and "31"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=joining)
    assert not tokens._is_local(tokenizer)
    assert tokens.encode_continuations(tokenizer, [(tokens.PROMPTS[0], "31")]) == [[96]]


def test_of_a_text_in_the_prompt_s_last_token_nothing_is_left():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3}, merges=[("a", "b")]))
    joining = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with pytest.raises(UserError, match="the candidate 'b' has no tokens of its own behind 'ca'"):
        encode(joining, [Question("ca", ("b", "c"), 1)])
    with pytest.raises(UserError, match="the answer 'b' has no tokens of its own"):
        complete(random_base(), joining, [Completion("ca", "b")])
    with pytest.raises(UserError, match="a prompt is empty"):
        encode(joining, [Question("", ("b", "c"), 1)])
    assert encode(joining, [Question("a", ("bc", "cc"), 0)]).rows == [[0], [0, 2]]  # the harness reads "bc" as "c" behind "a"


def test_prompts_do_not_end_with_what_a_tokenizer_appends():
    appends, plain = kit("llama with bos and eos"), kit("llama with bos")
    question = make("kv", pairs=3).questions(1, seed=0)[0]
    assert tokens.encode_prompts(appends, [question.prompt]) == plain([question.prompt])["input_ids"]
    asked = question.prompt, question.spans
    assert tokens.token_spans(appends, *asked) == tokens.token_spans(plain, *asked)
    needles = [make("needle", tokenizer=one, length=150) for one in (appends, plain)]
    prompts = [needle.questions(3, seed=0) for needle in needles]
    assert prompts[0] == prompts[1]
    assert {len(plain(asked.prompt)["input_ids"]) for asked in prompts[1]} == {150}  # the special token included


def test_a_tokenizer_that_appends_is_saved_as_one_that_does_not(tmp_path):
    for name in ("llama with eos", "llama with bos and eos"):
        appends = kit(name)
        changed = tokens.prompting(appends)
        changed.save_pretrained(tmp_path)
        for read in (changed, AutoTokenizer.from_pretrained(tmp_path)):
            assert read("a is")["input_ids"] == appends("a is")["input_ids"][:-1]
            assert read("a is", "b")["input_ids"][-1] != appends.eos_token_id
        assert appends("a")["input_ids"][-1] == appends.eos_token_id  # the user's is as it was
    assert tokens.prompting(kit("llama with bos")) is kit("llama with bos")
    refused = Tokenizer.from_str(kit("byte-level").backend_tokenizer.to_str())
    refused.post_processor = processors.BertProcessing(("<|endoftext|>", 0), ("<|endoftext|>", 0))
    with pytest.raises(UserError, match="ends every text, prompts included, with '<"):
        tokens.prompting(PreTrainedTokenizerFast(tokenizer_object=refused))


def test_texts_without_special_tokens():
    """A tokenizer that has neither a BOS nor an EOS nor a pad token."""
    tokenizer = kit("characters")
    assert tokenizer.eos_token is tokenizer.bos_token is tokenizer.pad_token is None
    assert len(World(Reading(tokenizer, 64, seed=0)).excerpt(0)) == 64
    assert TextWindows(windows=2, window=32).token_windows(tokenizer, seed=0).shape == (2, 32)


COMPARED = ("llama with bos and eos", "llama with eos", "llama, pieces across the border", "unigram")


@pytest.mark.parametrize("name", but_slow(COMPARED, "llama with bos and eos", "unigram"))
def test_bench_decides_as_the_harness_s_command_does(name, tmp_path, monkeypatch):
    """On the exported folder, example by example and candidate by candidate; the embedding has more rows than the tokenizer."""
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="needs the extra 'eval' (lm-evaluation-harness)")
    from lm_eval.tasks import TaskManager

    from surgery.more import TASKS, harness

    tokenizer, plan = kit(name), Plan(sites=("L0.H3",))
    base = random_base(vocab_size=len(tokenizer) + 11, num_hidden_layers=1)
    hybrid = splice(base, plan)
    export(hybrid, tmp_path / "hybrid", tokenizer=tokenizer, plan=plan, base="random")
    monkeypatch.setattr(evaluator, "add_env_info", lambda _: None)  # lists all packages, for seconds
    said = evaluator.simple_evaluate(
        "hf", f"pretrained={tmp_path / 'hybrid'}", ["surgery_kv_4", "surgery_mqar_8", "surgery_phonebook_8"], batch_size=8,
        device="cpu", bootstrap_iters=0, limit=10, task_manager=TaskManager(include_path=TASKS, include_defaults=False),
    )["samples"]  # fmt: skip
    options = Bench(suites=("retrieval",), pairs=(4, 8), limit=10, contexts=())
    ours = {task.name: task for task in suites.tasks(options, tokenizer, Data(), 0)}
    for task in ("kv.4", "mqar.8", "phonebook.8"):
        theirs = said[f"surgery_{task.replace('.', '_')}"]
        assert ours[task].measure(hybrid).values.tolist() == [sample["acc"] for sample in theirs]
    (task,) = harness.load(["surgery_kv_4"])["surgery_kv_4"]
    assert harness.evaluate(hybrid, tokenizer, task, 4, 10)[0]["acc"].tolist() == [s["acc"] for s in said["surgery_kv_4"]]
    encoded = encode(tokenizer, make("kv", pairs=4, keys="lessons").questions(10, bench_seed(0)))
    # What the harness adds up in float32, against float64.
    with float64(), torch.no_grad():
        hybrid = hybrid.double()
        exact = encoded.scores(torch.stack([hybrid(torch.tensor([row])).logits[0, -1] for row in encoded.rows]))
    assert exact.dtype == torch.float64
    scores = [[value for ((value, _),) in sample["resps"]] for sample in said["surgery_kv_4"]]
    torch.testing.assert_close(torch.tensor(scores, dtype=torch.float64), exact, rtol=0, atol=1e-3)


def test_the_harness_gives_no_pad_token_to_the_caller_s_tokenizer():
    pytest.importorskip("lm_eval", reason="needs the extra 'eval' (lm-evaluation-harness)")
    from surgery.more import harness

    tokenizer = unigram()
    (task,) = harness.load(["surgery_kv_4"])["surgery_kv_4"]
    harness.evaluate(random_base(vocab_size=len(tokenizer), num_hidden_layers=1), tokenizer, task, 4, 2)
    assert tokenizer.pad_token is None
    with pytest.raises(UserError, match="needs a tokenizer with a BOS or an EOS token"):
        harness.evaluate(random_base(), kit("characters"), task, 4, 2)


def test_a_summary_ends_with_the_prompt():
    assert tokens.summary([3, 4, 5], 9) == [4, 5, 6]
    assert tokens.summary([3, 4, 5], 6) == [4, 5]
    assert tokens.summary([5], 6) == [5]
    assert tokens.summary([], 6) == []
