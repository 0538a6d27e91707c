"""Texts as tokens: what a prompt begins with, and what follows it.

The tokens of two texts are not always the tokens of both together. A SentencePiece tokenizer (Llama's) begins every text with
a space of its own, and any tokenizer may merge letters across the border. So what follows a prompt is cut from the tokens of
the whole text, in the same place where lm-evaluation-harness cuts it:

    following(prompt, text) = tokens(prompt + text)[len(tokens(prompt)):]

White space at a prompt's end belongs to what follows (`divided`).

A thousand questions with 64 candidates each are 64,000 long texts that differ in the last token or two. Most tokenizers never
join what stands before a space between two visible characters to what stands behind it. For them the beginning of the prompt is
left out (`_tail`). A tokenizer is trusted with that if no entry of its vocabulary crosses such a space and if it cuts a few
trial texts in the same way with the beginning and without it (`_try_barriers`).
"""

import bisect
import copy
import json
import re
from collections.abc import Sequence
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError

BARRIER = re.compile("(?<=[!-~]) (?=[!-~])")
ACROSS = re.compile("[!-~][ \u0120\u2581]")  # a space as it is, as byte-level tokenizers write it, and as SentencePiece does
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
    """A prompt and what follows it, with the white space between them in the latter."""
    bare = prompt.rstrip()
    return bare, prompt[len(bare) :] + text


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of prompts: with the special tokens that the tokenizer puts before a text, and without those that it puts
    behind it."""
    if not texts:
        return []
    appended = len(_added(tokenizer)[1])
    return [ids[: len(ids) - appended] for ids in tokenizer(list(texts), verbose=False)["input_ids"]]


def encode_continuations(tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
    """For every (prompt, text) the token ids of the text behind the prompt. The list is empty where the text is part of the
    prompt's last token."""
    if not texts:
        return []  # some tokenizers refuse an empty list
    known = _local.get(tokenizer)  # whether it joins nothing across a barrier
    if known is None or known[0] != len(tokenizer):
        known = _local[tokenizer] = (len(tokenizer), _try_barriers(tokenizer))
    cut = _tail if known[1] else str
    tails = {prompt: cut(prompt) for prompt in dict.fromkeys(prompt for prompt, _ in texts)}
    short = [(tails[prompt], text) for prompt, text in texts]
    distinct = sorted({tail for tail, _ in short} | {tail + text for tail, text in short})
    ids = dict(zip(distinct, tokenizer(distinct, add_special_tokens=False)["input_ids"], strict=True))
    return [ids[tail + text][len(ids[tail]) :] for tail, text in short]


def token_spans(
    tokenizer: PreTrainedTokenizerBase, prompt: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[list[int]]]:
    """The token ids of a prompt, and for every span of its characters (begin, end) the positions of the tokens in it."""
    if not tokenizer.is_fast:
        raise UserError(f"a {type(tokenizer).__name__} does not say where its tokens stand; a fast tokenizer is needed")
    (ids,) = encode_prompts(tokenizer, [prompt])
    offsets = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"][: len(ids)]
    begins, stops = [begin for begin, _ in offsets], [stop for _, stop in offsets]
    places = []
    for begin, stop in spans:  # stops rise; special tokens are empty, and stand at 0
        first, last = bisect.bisect_right(stops, begin), bisect.bisect_left(begins, stop)
        places.append([i for i in range(first, last) if stops[i] > begins[i]])
    return ids, places


def summary(span: Sequence[int], end: int) -> list[int]:
    """The positions at which a causal model may hold what it has read in a span of tokens, in a prompt of `end` tokens.

    They go from the span's second token, since the first cannot know the rest, to the token behind the span (a line break), at
    which summaries are often finished.
    """
    return [place for place in (*span[1:], span[-1] + 1) if place < end] or [span[-1]] if span else []


def without_end_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or, if it ends each text with special tokens, which would end each prompt, a copy that does not. Raises
    UserError where this cannot be switched off."""
    before, appended = _added(tokenizer)
    if not appended:
        return tokenizer
    changed: Any = copy.deepcopy(tokenizer)
    if getattr(changed, "add_eos_token", False):
        changed.add_eos_token = False
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        settings = json.loads(backend.to_str())
        for part in (settings["post_processor"] or {}).get("processors", [settings["post_processor"]]):
            for name in ("single", "pair"):
                while part and part.get(name) and "SpecialToken" in part[name][-1]:
                    part[name].pop()
        changed.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(settings)).post_processor
    if _added(changed) != (before, []):
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


def _tail(prompt: str) -> str:
    """The end of a prompt, from its last barrier but one: behind the last barrier its tokens are those of the whole prompt,
    however the tokenizer begins a text."""
    barriers = [match.start() for match in BARRIER.finditer(prompt, max(0, len(prompt) - REACH))]
    return prompt[barriers[-2] :] if len(barriers) > 1 else prompt


def _try_barriers(tokenizer: PreTrainedTokenizerBase) -> bool:
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
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
