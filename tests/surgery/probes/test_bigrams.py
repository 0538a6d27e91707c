"""Repeated rare bigrams: the vectors against plain loops, and the questions about them."""

import copy
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from surgery.errors import UserError
from surgery.probes import make_probe
from surgery.probes.bigrams import NONE, PairCounts, find_repeats
from surgery.probes.toy_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
ROWS = st.integers(1, 3).flatmap(
    lambda n: st.integers(3, 20).flatmap(
        lambda t: st.lists(st.lists(st.integers(0, 3), min_size=t, max_size=t), min_size=n, max_size=n)
    )
)


def find_slowly(rows, counted, rare, within, documents, gap):
    """The same as find_repeats, by its definition."""
    elsewhere = Counter(pair for text in counted for pair in pairwise(text))
    tokens = sum(map(len, counted))
    found = [[NONE] * len(row) for row in rows]
    for r, row in enumerate(rows):
        inside = Counter(pairwise(row))
        for place in range(1, len(row)):
            pair = (row[place - 1], row[place])
            if documents[r][place - 1] != documents[r][place]:
                continue
            here = documents[r][place]
            before = [
                other
                for other in range(1, place)
                if (row[other - 1], row[other]) == pair and documents[r][other - 1] == documents[r][other] == here
            ]
            own = inside[pair] if within else 0
            if before and place - before[-1] >= gap and elsewhere[pair] - own <= rare * tokens / 1e6:
                found[r][place] = before[-1]
    return found


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, gap=st.integers(1, 4), rare=st.sampled_from([0.0, 5e4, 2e5]), others=ROWS)
def test_repeats_are_those_of_the_definition(rows, gap, rare, others):
    documents = [[0] * len(row) for row in rows]
    counts = PairCounts([np.array(row) for row in others])
    found = find_repeats(np.array(rows), counts, rare, within=False, gap=gap)
    assert found.tolist() == find_slowly(rows, others, rare, False, documents, gap)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, gap=st.integers(1, 4), rare=st.sampled_from([0.0, 1e5]))
def test_a_rows_own_pairs_do_not_count(rows, gap, rare):
    documents = [[0] * len(row) for row in rows]
    counts = PairCounts([np.array(row) for row in rows])
    found = find_repeats(np.array(rows), counts, rare, within=True, gap=gap)
    assert found.tolist() == find_slowly(rows, rows, rare, True, documents, gap)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, gap=st.integers(1, 3), cut=st.integers(1, 19))
def test_documents_of_a_row_do_not_see_each_other(rows, gap, cut):
    documents = [[int(place >= cut) for place in range(len(row))] for row in rows]
    found = find_repeats(np.array(rows), PairCounts([]), 0.0, within=False, documents=np.array(documents), gap=gap)
    assert found.tolist() == find_slowly(rows, [], 0.0, False, documents, gap)


def test_questions_are_texts_and_what_follows(tmp_path):
    names = ["Quillane Marrobb", "Eskuth Tovi"]
    text = " ".join(f"{names[i % 2]} went to the {'mill inn well church tower'.split()[i % 5]} at noon." for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    trimmed = copy.deepcopy(TOKENIZER)  # whose ranges leave out the space before a word
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    options = {"source": str(tmp_path / "a.txt"), "tokens": 48, "rare": 1e5}
    asked, again = (make_probe("bigrams", each, **options).questions(20, 0) for each in (TOKENIZER, trimmed))
    assert len(asked) == 20
    assert [(each.prompt.lstrip(), each.choices) for each in again] == [(q.prompt.lstrip(), q.choices) for q in asked]
    for question in asked:
        assert question.prompt + question.choices[0] in text
        (begin, end), pair = question.spans[0], TOKENIZER.tokenize(question.prompt)[-1:]
        assert (
            TOKENIZER.tokenize(question.prompt[begin:end])[-1] in TOKENIZER.tokenize(question.prompt + question.choices[0])[-1:]
        )
        assert pair


def test_texts_without_repeats_are_refused(tmp_path):
    (tmp_path / "short.txt").write_text("one two")
    (tmp_path / "plain.txt").write_text(" ".join(f"{i} {j}" for i in range(30) for j in range(i)))
    with pytest.raises(UserError, match=r"short\.txt"):
        make_probe("bigrams", TOKENIZER, source=str(tmp_path / "short.txt"), tokens=64).questions(2, 0)
    with pytest.raises(UserError, match=r"plain\.txt"):
        make_probe("bigrams", TOKENIZER, source=str(tmp_path / "plain.txt"), tokens=32, rare=0.0).questions(2, 0)
