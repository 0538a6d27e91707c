"""Data for tuning: everything follows from the seed and the step, documents stay apart, and so does what is held out."""

import json
import random
import re
import sys
import textwrap
from collections import Counter
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.evaluation.task import bench_seed
from surgery.probes import make, needle
from surgery.probes.knowledge import CAPITALS
from surgery.probes.kv import KVRetrieval
from surgery.records.recipe import Bench, Data, Lesson, Text, Tune
from surgery.tuning import leaks
from surgery.tuning.batches import FIRST_SEED, Lessons, Rows, check, held_out_windows, loaders
from surgery.tuning.packed_rows import pack, padding_share
from surgery.tuning.run import CURVE_SEED, HELD_OUT_SEED
from surgery.tuning.sequences import IGNORE, collate, kv_pieces
from surgery.tuning.text_sources import HELD_OUT, Reading, open_source
from surgery.world.text import document

WORDS = 400  # a document of the folders below is one of these words, again and again


@pytest.fixture(scope="session")
def words():
    """A tokenizer of the words w0 to w399, one token each, which puts <s> before every text."""
    vocabulary = {"<s>": 0, "?": 1} | {f"w{i}": i + 2 for i in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="?")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The same documents, of 1 to 40 times one word, as JSON lines and as a folder of two parquet files; and a text file."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    path = tmp_path_factory.mktemp("documents")
    rng = random.Random(0)
    texts = [" ".join([f"w{i}"] * rng.randint(1, 40)) for i in range(WORDS)]
    lines = [json.dumps({"body": text, "number": i}) + "\n" for i, text in enumerate(texts)]
    (path / "documents.jsonl").write_text("".join(lines))
    (path / "parquet").mkdir()
    for part in range(2):
        rows = datasets.Dataset.from_dict({"body": texts[part::2], "number": list(range(part, WORDS, 2))})
        rows.to_parquet(path / "parquet" / f"train-{part}.parquet")
    (path / "text.txt").write_text(" ".join(f"w{i}" for i in range(WORDS)))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Datasets that a test loads go to its own folder."""
    if "datasets" in sys.modules:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(params=["jsonl", "parquet", "streamed"])
def documents(request, folder):
    source = folder / ("documents.jsonl" if request.param == "jsonl" else "parquet")
    return Text(source=str(source), column="body", streaming=request.param == "streamed")


def batches(tokenizer, options, data, seed=0, start=0):
    return list(zip(*loaders(tokenizer, options, data, seed, start), strict=True))


def same(one, other):
    flat = [[tensor for batch in batches for pair in batch for tensor in pair] for batches in (one, other)]
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


EVERY_LESSON = (
    Lesson(options={"pairs": (2, 6)}, queries=3),
    Lesson(probe="mqar", options={"pairs": (4, 8)}),
    Lesson(probe="copying", options={"length": (3, 9)}, weight=2),
)


def test_a_resumed_run_sees_the_rest_of_the_uninterrupted_one(tiny, folder, documents):
    """Of every kind of lesson and text mixed, and whatever the number of steps that was planned."""
    texts = (documents, Text(source=str(folder / "text.txt"), weight=0.5), Text(source="world"))
    options, data = (
        Tune(steps=21, batch_size=2, lessons=EVERY_LESSON, text_batch_size=3, text_tokens=16),
        Data(train_text=texts),
    )
    whole = batches(tiny.tokenizer, options, data)
    assert len(whole) == 21
    for start in (1, 17, 20):
        assert same(batches(tiny.tokenizer, options, data, start=start), whole[start:])
    longer = batches(tiny.tokenizer, options.model_copy(update={"steps": 40}), data)
    assert same(longer[:21], whole)
    assert not same(batches(tiny.tokenizer, options, data, seed=1), whole)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 9), index=st.integers(0, 41), more=st.integers(0, 30))
def test_an_item_depends_on_the_seed_and_its_index_alone(tiny, seed, index, more):
    options = Tune(steps=14, batch_size=3, lessons=EVERY_LESSON, text_batch_size=3, text_tokens=12)
    longer = options.model_copy(update={"steps": 14 + more})
    assert Lessons(tiny.tokenizer, options, seed)[index] == Lessons(tiny.tokenizer, longer, seed)[index]
    rows = Rows(tiny.tokenizer, longer, Data(), seed)
    rows[41 - index]  # what was asked before does not matter
    assert rows[index] == Rows(tiny.tokenizer, options, Data(), seed)[index]


def test_documents_that_share_a_row_are_told_apart(words, documents):
    """Positions begin again with each, and with nothing else: padding goes on with the last one's."""
    options = Tune(steps=40, text_batch_size=4, text_tokens=48)
    _, text = loaders(words, options, Data(train_text=(documents,)), 0, 0)
    seen, lengths = Counter(), []
    for ids, real, places in text:
        assert ids.shape == real.shape == places.shape
        assert (ids[~real] == 0).all()
        for row, mask, own in zip(ids, real, places, strict=True):
            tokens = row[mask].tolist()
            assert len(tokens) <= 48
            assert not mask[len(tokens) :].any()  # padding is on the right
            begins = (own == 0).nonzero()[:, 0].tolist()
            assert begins[-1] < len(tokens)
            for first, behind in pairwise([*begins, len(row)]):
                assert own[first:behind].tolist() == list(range(behind - first))
                document = tokens[first:behind]
                (word,) = set(document[1:])  # <s> stands before a document
                assert document[0] == 0
                assert word
                seen[word] += 1
                lengths.append(len(document))
    assert len(seen) > 180  # different documents
    assert len(lengths) > 1.6 * 40 * 4  # many share
    assert set(lengths) == set(range(2, 42))  # none is cut


def test_rows_are_full_of_the_documents_that_were_drawn(words, folder):
    """As many rows as were asked for, little of them padding; what does not fit is passed over, whatever its length."""
    data = Data(train_text=(Text(source=str(folder / "documents.jsonl"), column="body"),))
    options = Tune(steps=64, text_batch_size=4, text_tokens=96)
    rows = Rows(words, options, data, 0)
    lengths = [len(rows.sources[source].excerpt(index)) for source, index in rows.drawn]
    assert 1 - sum(lengths) / len(lengths) / max(lengths) > 0.25  # what padding would be
    assert padding_share(loaders(words, options, data, 0, 0)[1]) < 0.06
    assert len(rows) == 256
    for buffer in range(4):
        found = Counter(len(document) for i in range(64) for document in rows[64 * buffer + i])
        some = lengths[buffer * rows.per_buffer :][: found.total()]
        assert found == Counter(some)  # the first that were drawn
        assert found.total() > 0.8 * rows.per_buffer


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 12))
@example([0, 0], 2)
def test_a_row_takes_what_fits(lengths, count):
    count = min(count, len(lengths))
    rows = pack(lengths, count, 20)
    taken = [i for row in rows for i in row]
    assert sorted(taken) == list(range(len(taken)))  # none is left out for its length
    assert len(rows) == count
    assert all(row and row == sorted(row) and sum(lengths[i] for i in row) <= 20 for row in rows)
    assert rows == sorted(rows)
    if len(taken) < len(lengths):  # with the next one it would be too much, or nearly
        assert sum(lengths[: len(taken) + 1]) > 20 * count / 2
    assert pack([20] * len(lengths), count, 20) == [[i] for i in range(count)]


def test_windows_of_one_length_keep_their_order(tiny):
    options = Tune(steps=20, text_batch_size=2, text_tokens=12)
    source = open_source(Text(source="world"), Reading(tiny.tokenizer, 12, seed=4))
    rows = Rows(tiny.tokenizer, options, Data(), 4)
    assert [rows[i] for i in range(40)] == [[source.excerpt(i)] for i in range(40)]


def test_weights_are_honoured(tiny, folder):
    weights = (1.0, 2.5, 0.5)
    data = Data(train_text=tuple(Text(source="world", weight=weight) for weight in weights))
    lessons = tuple(Lesson(options={"pairs": 2}, weight=weight) for weight in weights)
    options = Tune(steps=4000, batch_size=1, lessons=lessons, text_batch_size=1)
    drawn = Counter(source for source, _ in Rows(tiny.tokenizer, options, data, 0).drawn)
    lessons = Lessons(tiny.tokenizer, options, 0)
    chosen = Counter(lessons.lesson(step).weight for step in range(options.steps))
    for i, weight in enumerate(weights):
        assert drawn[i] / drawn.total() == pytest.approx(weight / 4, abs=0.03)  # four standard deviations
        assert chosen[weight] / 4000 == pytest.approx(weight / 4, abs=0.03)


def test_held_out_documents_are_never_trained_on(words, documents):
    options, data = Tune(steps=160, text_batch_size=4, text_tokens=16), Data(train_text=(documents,))
    trained = {t for ids, *_ in loaders(words, options, data, 0, 0)[1] for t in ids.unique().tolist()} - {0}
    ids, real = held_out_windows(words, data, options, 60, seed=0)
    assert ids.shape == real.shape == (60, real.sum(1).max())
    held_out = set(ids.unique().tolist()) - {0}
    assert not trained & held_out
    assert len(trained) > 250
    assert WORDS / HELD_OUT / 2 < len(held_out) < WORDS / HELD_OUT * 2


def test_held_out_text_of_a_file_is_its_end(words, folder):
    options, data = Tune(steps=50, text_tokens=16), Data(train_text=str(folder / "text.txt"))
    trained = max(ids.max().item() for ids, *_ in loaders(words, options, data, 0, 0)[1])
    ids, real = held_out_windows(words, data, options, 20, seed=0)
    assert real.all()
    assert trained < ids.min().item()
    assert ids.shape == (20, 16)


def test_of_a_folder_of_text_files_the_end_of_each_is_held_out(words, tmp_path):
    """A longer file is drawn more often, and other files are no text."""
    (tmp_path / "more").mkdir()
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in range(320)))
    (tmp_path / "more" / "b.md").write_text(" ".join(f"w{i}" for i in range(320, 400)))
    (tmp_path / "picture.png").write_bytes(b"\xff")
    text = Text(source=str(tmp_path))
    trained, held_out = (open_source(text, Reading(words, 8, 0, held_out=side)) for side in (False, True))
    seen, kept = ([source.excerpt(i) for i in range(300)] for source in (trained, held_out))
    assert not {t for ids in seen for t in ids} & {t for ids in kept for t in ids} - {0, 1}  # <s>, and words that were cut
    of_b = [ids for ids in seen if min(set(ids) - {0, 1}) >= 322]
    assert 0.1 < len(of_b) / len(seen) < 0.35
    assert any(min(set(ids) - {0, 1}) >= 322 for ids in kept)
    assert all(ids == list(range(ids[0], ids[0] + len(ids))) for ids in seen if not {0, 1} & {*ids})
    assert seen[7] == open_source(text, Reading(words, 8, 0)).excerpt(7)
    options, data = Tune(steps=3, text_batch_size=2, text_tokens=16), Data(train_text=(text,))
    assert same(batches(words, options, data, start=1), batches(words, options, data)[1:])
    with pytest.raises(UserError, match=r"100.0% of \S*a.txt is also in"):
        check(words, options, Data(train_text=(text,), held_out_text=str(tmp_path / "a.txt")))


def test_held_out_documents_of_the_world_are_neither_trained_on_nor_measured_on(tiny):
    """They are whole documents of its training text that training passes over."""

    def whole(rows):
        texts = [tiny.tokenizer.decode(row).split(tiny.tokenizer.eos_token) for row in rows]
        return {text for parts in texts for text in parts[1:-1]}  # the last one is cut

    options = Tune(steps=30, text_batch_size=2, text_tokens=400)
    trained = whole(ids for batch, *_ in loaders(tiny.tokenizer, options, Data(), 0, 0)[1] for ids in batch)
    held_out = whole(held_out_windows(tiny.tokenizer, Data(), options, 12, seed=0)[0])
    measured = {document(random.Random(f"measured {i}"), held_out=True) for i in range(200)}
    sentences = {sentence for text in measured for sentence in text.split(".")}
    assert len(trained) > 60
    assert len(held_out) > 12
    assert not trained & held_out
    narrative = {s.strip() for s in sentences if " near " in s}
    assert narrative
    assert not narrative & {s.strip() for text in trained | held_out for s in text.split(".")}


def test_a_sequence_begins_as_the_tokenizer_begins_a_prompt(words):
    ids, targets = collate(
        words, [[("w3 w4", False), (" w5", True), (" w6", False), (" w7", True)], [("w8 ", False), ("w9", True)]]
    )
    assert ids.tolist() == [[0, 5, 6, 7, 8, 9], [0, 10, 11, 0, 0, 0]]
    assert targets.tolist() == [[IGNORE, IGNORE, 7, IGNORE, 9, IGNORE], [IGNORE, 11, IGNORE, IGNORE, IGNORE, IGNORE]]


@pytest.mark.parametrize(
    ("probe", "options"),
    [
        ("kv", {"pairs": (2, 9)}), ("phonebook", {"entries": (3, 6)}), ("selective_copying", {"count": (1, 4), "length": 9}),
        ("letters", {"source": "capitals"}),
    ],
)  # fmt: skip
def test_every_probe_can_be_a_lesson(tiny, probe, options):
    """A batch has one draw of the options; the right answer, and nothing else, is the target."""
    tune = Tune(steps=12, batch_size=3, lessons=(Lesson(probe=probe, options=options, queries=2 if probe == "kv" else None),))
    check(tiny.tokenizer, tune, Data())
    lessons = Lessons(tiny.tokenizer, tune, 0)
    drawn = [lessons.drawn(step) for step in range(12)]
    for name, ends in options.items():
        if isinstance(ends, tuple):
            assert len({values[name] for values in drawn}) > 1
            assert {values[name] for values in drawn} <= set(range(ends[0], ends[1] + 1))
    for step in range(12):
        for index in range(3 * step, 3 * step + 3):
            pieces = lessons[index]
            assert [bool(wanted) for _, wanted in pieces] == [False, True] * (len(pieces) // 2)
            if probe == "kv":
                assert pieces[0][0].count(":") == drawn[step]["pairs"] + 1
                assert len(pieces) == 4
    assert len({lessons[i][0][0] for i in range(36)}) == 36


def test_questions_of_lessons_are_not_those_that_are_measured(tiny):
    """Bench and locate ask with the recipe's seed, or that and a little."""
    tune = Tune(steps=50, batch_size=2, lessons=(Lesson(probe="mqar", options={"pairs": 4}),))
    lessons = Lessons(tiny.tokenizer, tune, 0)
    assert FIRST_SEED > 2**62
    assert len({lessons[i][0][0] for i in range(100)}) == 100
    assert len(kv_pieces(random.Random(0), pairs=5, queries=9)) == 2 * 5  # no key is asked for twice
    only_kv = tune.model_copy(update={"lessons": (Lesson(options={"pairs": 8}),)})
    measured = {q.prompt[:120] for seed in (0, 77, bench_seed(0)) for q in KVRetrieval(8).questions(200, seed)}
    for seed in (0, HELD_OUT_SEED, CURVE_SEED):  # what is learnt from, and what is looked at meanwhile
        kv = Lessons(tiny.tokenizer, only_kv, seed)
        assert not measured & {kv[i][0][0][:120] for i in range(100)}


@pytest.mark.parametrize(
    ("lesson", "complaint"),
    [
        (Lesson(probe="kw", options={"pairs": 3}), "no probe is named 'kw'"),
        (Lesson(options={"pairs": (4, 101)}), "kv takes 1 to 100 pairs, not 101"),
        (Lesson(probe="mqar", options={"pairs": (2, 64)}), "mqar with 2 pairs takes 1 to 2 queries, not 4"),
        (Lesson(probe="mqar", options={"pairs": 9}, queries=2), "queries are for kv"),
        (Lesson(probe="knowledge", options={"source": (1, 2)}), "option 'source' is 1"),
        (Lesson(probe="needle", options={"length": 64}), r"\(data.held_out_text\); give it source: lessons"),
    ],
)
def test_lessons_that_cannot_be_given_are_refused(tiny, lesson, complaint):
    data = Data(held_out_text="elsewhere.txt") if lesson.probe == "knowledge" else Data(facts="capitals")
    options = Tune(lessons=(lesson,))
    with pytest.raises(UserError, match=complaint):
        check(tiny.tokenizer, options, data)
    with pytest.raises(UserError, match=complaint):
        loaders(tiny.tokenizer, options, data, 0, 0)


def test_needles_are_learnt_in_documents_that_lessons_may_hold(tiny, monkeypatch):
    """The default haystack is held out, and measured on."""
    lesson = Lesson(probe="needle", options={"length": 96, "source": "lessons"})
    check(tiny.tokenizer, Tune(lessons=(lesson,)), Data())
    drawn = []
    monkeypatch.setattr(needle, "document", lambda rng, held_out: drawn.append(held_out) or document(rng, held_out=held_out))
    loaders(tiny.tokenizer, Tune(lessons=(lesson,)), Data(), 0, 0)
    pieces = Lessons(tiny.tokenizer, Tune(lessons=(lesson,)), 0)[0][0]
    assert "The secret number of" in pieces[0]
    assert set(drawn) == {False}
    make("needle", tokenizer=tiny.tokenizer, length=96).questions(1, 0)
    assert set(drawn) == {False, True}


def test_a_loop_of_links_is_no_file_that_is_measured(tiny, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    check(tiny.tokenizer, Tune(lessons=(Lesson(options={"pairs": 3}),)), Data(facts=str(tmp_path / "loop"), skills=()))


def write(folder, name, content):
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "content", "fields", "complaint"),
    [
        ("a.txt", None, {}, "cannot read the text in .*a.txt: No such file"),
        ("a.txt", b"", {}, "a.txt is too short: 0 of its 0 tokens are to train on, and a window needs 16"),
        ("a.txt", b"\xff\xfe words", {}, "cannot read the text in .*a.txt: not UTF-8 at byte 0"),
        ("a.txt", b"words", {"column": "body"}, "has no column, but 'body' is given"),
        ("a.jsonl", None, {}, "cannot read the documents in .*a.jsonl: No such file"),
        ("a.jsonl", b"", {}, "a.jsonl holds no documents"),
        ("a.jsonl", b'{"text": "one"}\n\xff\n', {}, "a.jsonl: not UTF-8 at byte 16"),
        ("a.jsonl", b'{"text": "one"}\n{"text"\n', {}, "a.jsonl, line 2, is not JSON"),
        ("a.jsonl", b'{"body": "one", "n": 3}\n', {}, r"\(line 1\) has no column 'text'; it has body, n"),
        ("a.jsonl", b'{"text": 3}\n', {}, "a document has to be text, not int"),
        ("a.jsonl", b'{"text": " "}\n{"text": null}\n', {}, "holds no text to train on"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "\\ud800"}\n', {}, "a.jsonl, line 2, holds a text with half a surrogate pair"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "\\ud800"}\n', {"streaming": True}, "line 2, holds a text with half a surr"),
        ("a.jsonl", b'{"text": "one"}\n', {"split": "test"}, "has no split, but 'test' is given"),
        ("a.jsonl", b'{"body": "one", "n": 3}\n', {"streaming": True}, "has no column 'text'; it has body, n"),
        ("a.csv", b"body,n\none,3\n", {}, r"\(split 'train'\) has no column 'text'; it has body, n"),
        ("a.csv", b"text\none\n", {"split": "test"}, 'cannot load the dataset .*a.csv: Unknown split "test"'),
        ("a.parquet", b"no parquet", {}, "cannot load the dataset .*a.parquet"),
        ("a.parquet", None, {"streaming": True}, "cannot read the documents in .*a.parquet: No such file"),
    ],
)
def test_text_that_cannot_be_had_is_refused(words, tmp_path, name, content, fields, complaint):
    source = str(tmp_path / name) if content is None else write(tmp_path, name, content)
    with pytest.raises(UserError, match=complaint) as refused:
        check(words, Tune(text_tokens=16), Data(train_text=(Text(source=source, **fields),)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_document_may_hold_nul(words, tmp_path, streaming):
    """What no name of a file may hold, whichever way it is read."""
    if streaming:
        pytest.importorskip("datasets", reason="datasets is not installed")
    source = write(tmp_path, "a.jsonl", "".join(f'{{"text": "w{n} \\u0000 w{n + 1}"}}\n' for n in range(40)).encode())
    check(words, Tune(text_tokens=16), Data(train_text=(Text(source=source, streaming=streaming),)))


def test_without_the_package_datasets_there_is_a_hint(words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'mamba-surgery\[data\]'"):
        check(words, Tune(text_tokens=16), Data(train_text=(Text(source="some/dataset"),)))


def prose(seed, paragraphs):
    """Paragraphs of 40 to 80 words that no other seed has."""
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randint(40, 80))) + "." for _ in range(paragraphs)]


OWN, HELD, LICENCE = prose(1, 300), prose(2, 60), " ".join(prose(3, 1))


def as_json_lines(paragraphs):
    return "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(paragraphs))


@pytest.mark.parametrize(
    ("name", "content", "streaming"),
    [
        ("wrapped.txt", "\n".join(textwrap.wrap(" ".join([*OWN, *HELD]).upper(), 60)), False),
        ("a_tenth.txt", "\n\n".join([*OWN, *random.Random(0).sample(HELD, 6)]), False),
        ("what_is_measured.txt", "\n\n".join([*OWN, *HELD[:2]]), False),
        ("documents.jsonl", as_json_lines([*random.Random(0).sample(HELD, 60), *OWN]), False),
        ("words.jsonl", as_json_lines([*OWN, *" ".join(HELD).split()]), False),
        ("streamed.jsonl", as_json_lines([*OWN, *HELD]), True),
    ],
)
def test_a_copy_of_what_is_measured_on_is_not_trained_on(words, tmp_path, name, content, streaming):
    """Under another name, in another format, in a mixture, in part."""
    if streaming:
        pytest.importorskip("datasets", reason="datasets is not installed")
    held_out = write(tmp_path, "held.txt", "\n\n".join(HELD).encode())
    copied = Text(source=write(tmp_path, name, content.encode()), weight=0.01, streaming=streaming)
    own = Text(source=write(tmp_path, "own.txt", "\n\n".join(OWN).encode()))
    data = Data(train_text=(own, Text(source="world"), copied), held_out_text=held_out)
    with pytest.raises(UserError, match=rf"% of \S*held.txt is also in \S*{name}; data.held_out_text must not") as refused:
        check(words, Tune(text_tokens=16), data, Bench(windows=2, window=8))
    assert "\n" not in str(refused.value)
    check(words, Tune(text_tokens=16), data.model_copy(update={"train_text": (own, Text(source="world"))}))


def test_what_many_texts_share_is_tolerated(words, tmp_path, capsys):
    """A licence at both ends; a stream is read as far as training reads it."""
    train = write(tmp_path, "train.txt", "\n\n".join([LICENCE, *OWN, LICENCE]).encode())
    held_out = write(tmp_path, "held.txt", "\n\n".join([*HELD, LICENCE]).encode())
    check(words, Tune(text_tokens=16), Data(train_text=train, held_out_text=held_out))
    assert re.search(r"1\.\d% of \S*held.txt is also in \S*train.txt; up to 5% is accepted", capsys.readouterr().err)


@pytest.mark.parametrize("chunk", [leaks.CHUNK, 500, 131])
def test_the_share_that_is_found_is_the_share_that_is_there(monkeypatch, chunk):
    """Against a search for every stretch, however the texts are divided."""
    monkeypatch.setattr(leaks, "CHUNK", chunk)
    leaks._powers.cache_clear()
    rng = random.Random(0)
    text = "".join(rng.choice("abcd \n,é") for _ in range(2000))
    other = text[100:900] + "".join(rng.choice("abcd") for _ in range(500)) + text[1500:1700].upper().replace(" ", "\r\n")
    letters, others = (leaks._letters(one) for one in (text, other))
    places = range(len(letters) - leaks.WINDOW + 1)
    expected = sum(letters[i : i + leaks.WINDOW] in others for i in places) / len(places)
    assert 0.3 < expected < 0.6
    cuts = sorted(rng.sample(range(len(other)), 20))
    divided = [other[a:b] for a, b in pairwise([0, *cuts, len(other)])]
    for texts in ([other], divided, [*divided, ""]):
        assert leaks.CheckedText(text).share(texts) == expected
    assert leaks.CheckedText(text, 100).share([text[:300]]) == 1  # its measured part
    assert (
        leaks.CheckedText("short").share([text])
        == leaks.CheckedText(text).share([])
        == leaks.CheckedText("").share(["a" * 99])
        == 0
    )
    leaks._powers.cache_clear()


def test_no_more_than_a_limit_is_read(monkeypatch, capsys):
    monkeypatch.setattr(leaks, "LIMIT", 1000)
    assert sum(map(len, leaks._limited("endless", (LICENCE for _ in count())))) == 1000
    assert "endless: only the first 1,000 characters are compared" in capsys.readouterr().err


@pytest.mark.parametrize(("probe", "file"), [("knowledge", "facts.jsonl"), ("letters", "facts.jsonl"), ("needle", "text.txt")])
def test_lessons_read_no_copy_of_what_is_measured(tiny, tmp_path, probe, file):
    facts = Path(CAPITALS).read_bytes().splitlines(keepends=True)
    write(tmp_path, "facts.jsonl", b"".join(facts[:5]))
    write(tmp_path, "text.txt", "\n".join(HELD).encode())
    options = {"source": str(tmp_path / file)} | ({"length": 64} if probe == "needle" else {})
    tune = Tune(lessons=(Lesson(probe=probe, options=options),))
    held_out = write(tmp_path, "held.txt", "\n\n".join(HELD).encode())
    with pytest.raises(UserError, match=r"also in .*text.txt" if probe == "needle" else "facts.jsonl holds 5 of the 58 facts"):
        check(tiny.tokenizer, tune, Data(facts="capitals", held_out_text=held_out))
    check(tiny.tokenizer, tune, Data())


def test_a_depth_is_drawn_between_its_ends(tiny):
    needle = Lesson(probe="needle", options={"length": [100, 120], "depth": [0, 1], "source": "lessons"})
    options = Tune(steps=20, lessons=(needle,))
    drawn = [Lessons(tiny.tokenizer, options, 0).drawn(step) for step in range(20)]
    assert {type(each["length"]) for each in drawn} == {int}
    depths = [each["depth"] for each in drawn]
    assert len({*depths}) == 20
    assert min(depths) < 0.3
    assert max(depths) > 0.7


def test_too_little_to_hold_out_is_said(words, tmp_path):
    one = Data(train_text=(Text(source=write(tmp_path, "one.jsonl", b'{"text": "w1 w2"}\n')),))
    with pytest.raises(UserError, match="holds no text held out"):
        held_out_windows(words, one, Tune(text_tokens=16), 2, seed=0)


def test_a_long_document_gives_every_part_of_itself(words, tmp_path):
    """Windows of one that is much longer than a row; only a stretch of it is tokenised for each."""
    text = " ".join(f"w{i}" for i in range(WORDS))
    long = Text(source=write(tmp_path, "long.jsonl", json.dumps({"text": text}).encode()))
    source = open_source(long, Reading(words, 8, seed=0))
    rows = [source.excerpt(i) for i in range(300)]
    assert all(len(row) == 8 and 1 not in row for row in rows)  # whole words
    assert all(b == a + 1 for row in rows for a, b in pairwise(row) if a > 1)
    assert len({token for row in rows for token in row}) > WORDS * 0.9
