"""Texts as tokens: what a prompt begins with, and what follows it.

The tokens of two texts are not always the tokens of both together. A SentencePiece tokenizer (Llama's) begins every text with
a space of its own, and any tokenizer may merge letters across the border. What follows a prompt is therefore cut from the
tokens of the whole, where lm-evaluation-harness cuts it: behind as many tokens as the prompt alone has,

    following(prompt, text) = tokens(prompt + text)[len(tokens(prompt)):]

White space at a prompt's end belongs to what follows (`divided`). Where no token crosses the border, the prompt's tokens and
these are the tokens of the whole. Where one does, they are what the harness scores: a token that begins in the prompt counts as
one of the prompt's, as far as the prompt has tokens.

A thousand questions with 64 candidates each are 64,000 texts of some hundred tokens that differ in the last one or two. So the
prompt's beginning is left out where that changes nothing (`_tail`). Most tokenizers never join what precedes a space
between two visible characters to what follows it. This is the case if two conditions hold. No entry of the vocabulary
crosses such a space, since the model merges (BPE) or chooses (Unigram) entries only. And the text behind the space is cut into
words in the same way whether or not the text before it is there, which is tried once on texts like those of all prompts. With
any other tokenizer the whole text is tokenised.
"""

import bisect
import copy
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError

BARRIER = re.compile("(?<=[!-~]) (?=[!-~])")
ACROSS = re.compile("[!-~][ \u0120\u2581]")  # a space as such, of byte-level tokenizers, and of SentencePiece
REACH = 256  # characters of a prompt's end in which barriers are looked for
PROMPTS = (
    "Memorize the following dictionary:\nanchor:31\nbell:7\nThe value of the key 'bell' is 7\nThe value of the key 'anchor' is",
    "Amy Adams: 6123456789\nMary Ann Jones: 7000000001\n\nAmy Adams:",
    "Question: What's (1,024 + 3.5)? A. 12 B. it's 7\n\nHe said, \"we'll see\"... and\tthen -- no more of it. He'll",
    "anchor apple\nbell bird\n\nbell",
)
TEXTS = ("31", "7", " 31", " Bird", "\n\nThe value of the key", "\nB", " 6123456789", "'s", "'", ".", " (", "00", "é 日本")

_local: "WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, bool]]" = WeakKeyDictionary()


def divided(prompt: str, text: str) -> tuple[str, str]:
    """A prompt and what follows it, the white space between them with the latter."""
    bare = prompt.rstrip()
    return bare, prompt[len(bare) :] + text


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of prompts: with the special tokens that the tokenizer puts before a text, and without those that it
    appends."""
    if not texts:
        return []
    appended = len(_added(tokenizer)[1])
    return [ids[: len(ids) - appended] for ids in tokenizer(list(texts), verbose=False)["input_ids"]]


def encode_continuations(tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
    """For every (prompt, text) the token ids of the text behind the prompt; see the module. An empty list where the text is
    part of the prompt's last token."""
    if not texts:
        return []  # some tokenizers refuse an empty list
    cut = _tail if _is_local(tokenizer) else str
    tails = {prompt: cut(prompt) for prompt in dict.fromkeys(prompt for prompt, _ in texts)}
    short = [(tails[prompt], text) for prompt, text in texts]
    distinct = sorted({tail for tail, _ in short} | {tail + text for tail, text in short})
    ids = dict(zip(distinct, tokenizer(distinct, add_special_tokens=False)["input_ids"], strict=True))
    return [ids[tail + text][len(ids[tail]) :] for tail, text in short]


def token_spans(
    tokenizer: PreTrainedTokenizerBase, prompt: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[list[int]]]:
    """The token ids of a prompt, and for every span of its characters the positions of its tokens."""
    (ids,) = encode_prompts(tokenizer, [prompt])
    offsets = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"][: len(ids)]
    begins, stops = [begin for begin, _ in offsets], [stop for _, stop in offsets]
    places = []
    for begin, stop in spans:
        # The ends of tokens do not fall, and those of special tokens are at 0.
        first, last = bisect.bisect_right(stops, begin), bisect.bisect_left(begins, stop)
        places.append([i for i in range(first, last) if stops[i] > begins[i]])
    return ids, places


def summary(span: Sequence[int], end: int) -> list[int]:
    """Where a causal model may hold what it has read in a span of tokens: from its second token, as the first cannot know the
    rest, to the one behind it (the next line's key), on which summaries are often finished; of a prompt of `end` tokens."""
    return [place for place in (*span[1:], span[-1] + 1) if place < end] or [span[-1]] if span else []


def prompting(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or, if it appends special tokens to each text, which would end each prompt, a copy that does not.

    Raises UserError if this cannot be switched off.
    """
    if not (appended := _added(tokenizer)[1]):
        return tokenizer
    changed: Any = copy.deepcopy(tokenizer)
    if getattr(changed, "add_eos_token", False):
        changed.add_eos_token = False
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        settings = json.loads(backend.to_str())
        _end_with_text(settings["post_processor"])
        changed.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(settings)).post_processor
    if _added(changed) != (_added(tokenizer)[0], []):
        ends = tokenizer.decode(appended)
        raise UserError(f"the tokenizer ends every text, prompts included, with '{ends}'; save one with add_eos_token=False")
    return changed


def _added(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before a text and behind it."""
    bare, whole = (tokenizer("a 1", add_special_tokens=special)["input_ids"] for special in (False, True))
    if not bare:  # it does not know these characters
        return whole, []
    for begin in range(len(whole) - len(bare) + 1):
        if whole[begin : begin + len(bare)] == bare:
            return whole[:begin], whole[begin + len(bare) :]
    raise UserError("the tokenizer adds special tokens within a text")


def _end_with_text(processor: dict[str, Any] | None) -> None:
    """Take what follows the text out of a post-processor's settings."""
    for part in (processor or {}).get("processors", [processor]):
        for name in ("single", "pair"):
            while part and part.get(name) and "SpecialToken" in part[name][-1]:
                part[name].pop()


def _tail(prompt: str) -> str:
    """The end of a prompt, from its last barrier but one: behind the last barrier, its tokens are those of the whole prompt,
    however the tokenizer begins a text."""
    barriers = [match.start() for match in BARRIER.finditer(prompt, max(0, len(prompt) - REACH))]
    return prompt[barriers[-2] :] if len(barriers) > 1 else prompt


def _is_local(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer joins nothing across a barrier."""
    known = _local.get(tokenizer)
    if known is None or known[0] != len(tokenizer):
        known = _local[tokenizer] = (len(tokenizer), _try_barriers(tokenizer))
    return known[1]


def _try_barriers(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if type(model).__name__ not in ("BPE", "Unigram") or getattr(model, "dropout", None):
        return False
    if any(map(ACROSS.search, tokenizer.get_vocab())):
        return False
    for prompt, text in product(PROMPTS, TEXTS):
        tail = _tail(prompt)
        texts = [prompt, prompt + text, tail, tail + text]
        of_prompt, of_both, of_tail, of_tail_and_text = tokenizer(texts, add_special_tokens=False)["input_ids"]
        if of_both[len(of_prompt) :] != of_tail_and_text[len(of_tail) :]:
            return False
    return True


@contextmanager
def tokenizers_errors() -> Iterator[None]:
    """What the tokenizers library cannot write becomes an OSError: it raises a bare Exception then."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error
