"""Other names for rare tokens: what was equal stays equal, what is no rare word stays as it is, each document has its own."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.probes.hits import NONE, PairCounts
from surgery.records.recipe import Data, Rename, Tune
from surgery.tuning import renaming
from surgery.tuning.batches import check, loaders, training_pairs
from surgery.tuning.renaming import Renaming, token_kinds

RENAMED = Tune(
    steps=4, text_batch_size=2, text_tokens=160, lessons=(), hit_weight=1.0, rare=5000.0, rename=Rename(rare=2000.0)
)  # fmt: skip


@pytest.fixture(scope="module")
def renamed_by(tiny):
    """Of the tokens that stand at most once in a text of all tokens, of which the first half stand twice."""
    tokens = np.arange(len(tiny.tokenizer))
    pairs = PairCounts([np.r_[tokens, tokens[: len(tokens) // 2]]])
    return Renaming(tiny.tokenizer, pairs, 1.5e6 / pairs.tokens)


@given(document=st.lists(st.integers(0, 1659), max_size=80), seed=st.integers(0, 99))
def test_it_exchanges_rare_tokens_for_others_of_their_kind(tiny, renamed_by, document, seed):
    renamed = renamed_by(document, random.Random(seed))
    kinds = token_kinds(tiny.tokenizer)
    was, now = np.array(document, dtype=int), np.array(renamed, dtype=int)
    assert ((was[:, None] == was) == (now[:, None] == now)).all()
    assert (kinds[was] == kinds[now]).all()
    fixed = (was < len(kinds) // 2) | (kinds[was] == -1)
    assert (was[fixed] == now[fixed]).all()
    assert (now[~fixed] >= len(kinds) // 2).all()
    assert renamed == renamed_by(document, random.Random(seed))


def test_each_document_has_its_own_names(renamed_by):
    document = [token for group in renamed_by.groups for token in group.tolist()]
    first, second = (np.array(renamed_by(document, random.Random(seed))) for seed in (0, 1))
    assert (first != document).mean() > 0.9
    assert (first != second).mean() > 0.9


def test_a_kind_is_of_one_script_with_or_without_space_and_capital():
    words = ["a", "b", "B", "Ć", "δ", "д", "Д", "ab", "1", "a1", ".", "水", "火", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kinds = token_kinds(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")).tolist()
    alike = {}
    for word, kind in zip(words, kinds, strict=True):
        alike.setdefault(kind, []).append(word)
    assert alike.pop(-1) == ["1", "a1", ".", "?"]
    assert list(alike.values()) == [["a", "b", "ab"], ["B", "Ć"], ["δ"], ["д"], ["Д"], ["水", "火"]]


def test_tokens_beyond_the_tokenizer_stay(renamed_by):
    assert renamed_by([10**6], random.Random(0)) == [10**6]
    assert renamed_by([], random.Random(0)) == []


def test_the_text_of_tuning_is_renamed_and_its_hits_are_of_the_new_names(tiny):
    pairs = training_pairs(tiny.tokenizer, Data())

    def texts(options, start=0):
        return list(loaders(tiny.tokenizer, options, Data(), 0, start, pairs)[1])

    plain, renamed = (texts(options) for options in (RENAMED.model_copy(update={"rename": None}), RENAMED))
    changed, kinds = 0.0, token_kinds(tiny.tokenizer)
    for (was, *_), (now, real, places, before) in zip(plain, renamed, strict=True):
        changed += float((was != now)[real].double().mean()) / len(plain)
        assert (kinds[was] == kinds[now]).all()
        rows, columns = (before != NONE).nonzero(as_tuple=True)
        begins = columns - places[rows, columns]
        there = begins + before[rows, columns]
        assert len(rows)
        for back in (0, 1):
            assert (now[rows, there - back] == now[rows, columns - back]).all()
    assert 0.02 < changed < 0.9
    for one, other in zip(texts(RENAMED, start=2), renamed[2:], strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))


def test_what_cannot_be_renamed_is_refused(tiny):
    numbers = Tokenizer(models.WordLevel({str(i): i for i in range(10)} | {"?": 10}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=numbers, unk_token="?")
    with pytest.raises(UserError, match=r"take a larger rename\.rare, or leave rename out"):
        Renaming(tokenizer, PairCounts([np.arange(10)]), 300.0)


def test_numbers_of_tokens_may_have_holes():
    vocabulary = {"a": 0, "b": 1, "c": 2, "?": 3, "d": 9}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="?")), unk_token="?")
    renamed_by = Renaming(tokenizer, PairCounts([np.array([0, 1, 2, 9, 12])]), 1e6)
    assert [group.tolist() for group in renamed_by.groups] == [[0, 1, 2, 9]]
    renamed = renamed_by([9, 3, 9, 12], random.Random(0))
    assert renamed[0] == renamed[2]
    assert renamed[1::2] == [3, 12]


def test_what_cannot_be_renamed_is_refused_before_the_work(tiny, monkeypatch):
    """Also where lessons teach beside it."""
    monkeypatch.setattr(renaming, "token_kinds", lambda tokenizer: np.full(len(tokenizer), -1))
    with pytest.raises(UserError, match=r"tune\.rename: no two tokens"):
        check(tiny.tokenizer, Tune(hit_weight=1.0, rename=Rename(), text_tokens=64), Data())
