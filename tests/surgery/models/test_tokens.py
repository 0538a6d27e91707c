"""What follows a prompt is cut from the tokens of the whole text, whatever the tokenizer does at borders."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.models.tokens import (
    divided,
    encode_continuations,
    encode_prompts,
    summary,
    token_spans,
    without_end_token,
)

TOY = Path(__file__).parents[3] / "checkpoints" / "tiny-mamba2"
TEXTS = st.text(alphabet="ab 1:\n.'é", max_size=24)


def make_tokenizer(kind: str) -> Any:
    """toy: byte-level BPE of the built-in models. prefixed: as Llama's, a space before every text and a token that begins it.
    joined: a Unigram whose entries cross spaces. ended: one that ends every text with a token."""
    if kind == "toy":
        return AutoTokenizer.from_pretrained(TOY)
    corpus = ["the bell is a bell: 7 anchor 31\n", "a b ab ba 1 11 : . a1 b1 é"] * 20
    if kind == "joined":
        entries = [*((c, -5.0) for c in "ab 1:\n.'é"), ("b a", -1.0), ("a ", -1.5), ("<unk>", -9.0)]
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(entries, unk_id=len(entries) - 1)))
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    words.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    words.train_from_iterator(corpus, trainer)
    single = "$A </s>" if kind == "ended" else "<s> $A"
    words.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


TOKENIZERS = {kind: make_tokenizer(kind) for kind in ("toy", "prefixed", "joined")}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(prompt=TEXTS, text=TEXTS)
def test_continuations_are_cut_from_the_whole(kind: str, prompt: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer(prompt + text, add_special_tokens=False)["input_ids"]
    behind = ids[len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) :]
    assert encode_continuations(tokenizer, [(prompt, text), ("a b a", "1")])[0] == behind


@given(prompt=TEXTS, text=TEXTS)
def test_white_space_at_the_end_of_a_prompt_is_of_what_follows(prompt: str, text: str) -> None:
    bare, rest = divided(prompt, text)
    assert bare + rest == prompt + text
    assert bare == bare.rstrip()


@st.composite
def texts_with_spans(draw: Any) -> tuple[str, int, int]:
    """A text that is not empty, and where a span of it that is not empty begins and stops."""
    text = draw(TEXTS.filter(bool))
    begin = draw(st.integers(0, len(text) - 1))
    return text, begin, draw(st.integers(begin + 1, len(text)))


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(drawn=texts_with_spans())
def test_spans_hold_the_tokens_that_touch_them(kind: str, drawn: tuple[str, int, int]) -> None:
    prompt, begin, stop = drawn
    tokenizer = TOKENIZERS[kind]
    ids, (span,) = token_spans(tokenizer, prompt, [(begin, stop)])
    offsets = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    touching = [i for i, (first, last) in enumerate(offsets) if first < last and first < stop and last > begin]
    assert span == touching
    assert [ids] == encode_prompts(tokenizer, [prompt])


def test_prompts_begin_as_texts_do_and_do_not_end() -> None:
    ended = make_tokenizer("ended")
    assert ended("a b")["input_ids"][-1] == 2
    assert 2 not in encode_prompts(ended, ["a b"])[0]
    assert without_end_token(ended)("a b")["input_ids"] == encode_prompts(ended, ["a b"])[0]
    assert ended("a b")["input_ids"][-1] == 2  # the user's own is as it was
    prefixed = TOKENIZERS["prefixed"]
    assert encode_prompts(prefixed, ["a b"])[0][0] == 1
    assert without_end_token(prefixed) is prefixed


def test_special_tokens_within_a_text_are_refused() -> None:
    class Strange:
        def __call__(self, text: Any, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [5, 1, 6] if add_special_tokens else [5, 6]}

    with pytest.raises(UserError):
        without_end_token(Strange())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("span", "end", "want"), [([3, 4, 5], 9, [4, 5, 6]), ([3], 9, [4]), ([3], 4, [3]), ([7, 8], 9, [8]), ([], 9, [])]
)
def test_where_a_span_may_be_summarised(span: list[int], end: int, want: list[int]) -> None:
    assert summary(span, end) == want
