"""One short question over whose tokens mixing matrices are shown: its tokens, where its spans lie, and which part is drawn."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.locating.matrices import mixing_matrices
from surgery.locating.questions import asked
from surgery.locating.subject import Subject
from surgery.models.tokens import encode_prompts, token_spans
from surgery.probes.encoded import Asked
from surgery.probes.question import Passage
from surgery.records.site import Site

SHORT = 4  # lines of a dictionary, in a figure
MOST_COLUMNS = 36  # tokens whose labels can be read in a figure
MOST_ROWS = 8
CONTEXT = 10  # of the last tokens that are kept where not all fit


@dataclass(frozen=True)
class Window:
    """The part of a mixing matrix that is drawn. rows, columns: positions of tokens. labels: of the rows. answer: which of the
    columns hold the answer."""

    rows: list[int]
    columns: list[int]
    labels: list[str]
    answer: list[int]


def short_question(tokenizer: PreTrainedTokenizerBase, probe: str, options: dict[str, Any], seed: int) -> Asked:
    """A question of a probe whose tokens can be read in a figure: of fewer lines, where the probe has such an option and its
    others allow it."""
    shorter = {option: min(SHORT, value) for option, value in options.items() if option in ("pairs", "entries")}
    try:
        _, questions = asked(tokenizer, probe, options | shorter)
    except UserError:  # more queries than so few pairs, say
        _, questions = asked(tokenizer, probe, options)
    return questions(1, seed)[0]


def example_tokens(
    tokenizer: PreTrainedTokenizerBase, question: Asked
) -> tuple[list[int], list[str], list[tuple[int, ...]], tuple[int, ...]]:
    """Of a question: token ids, their texts, the positions of every span's tokens, and of those that hold the answer. Of a
    passage: up to the hit whose pair stood nearest before it, which is its only span."""
    spans: list[list[int]] = []
    evidence = question.evidence
    if isinstance(question, Passage):
        place, before = min(question.hits, key=lambda hit: hit[0] - hit[1])
        ids = list(question.ids[max(0, before - CONTEXT) : place])
        first = min(before, CONTEXT) - 1
        spans, evidence = [[first, first + 1]], 0
    elif question.spans:
        ids, spans = token_spans(tokenizer, question.prompt, question.spans)
    else:
        (ids,) = encode_prompts(tokenizer, [question.prompt])
    labels = [str(tokenizer.decode([token])).replace("\n", "\\n").strip(" ") for token in ids]
    answer = tuple(spans[evidence]) if spans and evidence is not None else ()
    return ids, labels, [tuple(span) for span in spans], answer


def example_matrices(subject: Subject, ids: Sequence[int], sites: Collection[Site]) -> dict[Site, Tensor]:
    """The mixing matrices (t, t) of heads over the tokens of an example."""
    return mixing_matrices(subject, torch.tensor(ids, device=subject.model.device), sites=sites)


def window(tokens: Sequence[str], spans: Sequence[Sequence[int]], answer: Collection[int]) -> Window:
    """Rows: the token after every span, where a gather head has condensed it, and the last token, which asks. Columns: the
    tokens from the first span to the end. Where they do not fit, those of the answer's span and the last ones; without spans,
    the last tokens alone."""
    last = len(tokens) - 1
    first = spans[0][0] if spans and spans[0] else max(0, len(tokens) - MOST_COLUMNS)
    columns = list(range(first, len(tokens)))
    if len(columns) > MOST_COLUMNS:
        held = sorted(answer)[: MOST_COLUMNS - CONTEXT - 1]
        after = [held[-1] + 1] if held and held[-1] < last - CONTEXT else []
        columns = sorted({*held, *after, *range(len(tokens) - (CONTEXT if held else MOST_COLUMNS), len(tokens))})
    shown = set(columns)
    rows = {
        span[-1] + 1: "after " + "".join(tokens[i] for i in span).replace("\\n", "").strip()
        for span in spans
        if shown.issuperset([*span, *([span[-1] + 1] if span else [])]) and span and span[-1] + 1 < last
    }
    if not rows and not spans:
        rows = {row: tokens[row] for row in columns[-MOST_ROWS:-1]}
    rows = dict(list(rows.items())[-MOST_ROWS:]) | {last: "last token"}
    return Window(list(rows), columns, list(rows.values()), [i for i, column in enumerate(columns) if column in answer])
