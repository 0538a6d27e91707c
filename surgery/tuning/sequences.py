"""Training sequences: dictionaries with many questions, and questions of probes.

A sequence is a list of pieces, each with a flag that says whether its tokens are targets. A piece is tokenised as the
continuation of those before it (models/tokens.py). The probes do the same, so a value has the same tokens in training and in
the probe. Where it is known what an answer is read from, the flag of the answer says so (Evidence).
"""

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.models.tokens import divided, encode_continuations, encode_prompts, summary, token_spans
from surgery.probes.kv import OPENING, ask, dictionary
from surgery.probes.question import CompletionProbe, Probe, Question, with_spans
from surgery.world.words import Keys


class EvidenceSpan(NamedTuple):
    """The characters of a sequence's first piece, from `begin` to before `stop`, that hold the answer. As a flag it is true."""

    begin: int
    stop: int


Piece = tuple[str, bool | EvidenceSpan]
IGNORE = -100


def kv_pieces(rng: random.Random, pairs: int, queries: int, keys: Keys = "lessons") -> list[Piece]:
    """A dictionary followed by at most `queries` questions about it. The targets are the values that are asked for."""
    entries = dictionary(rng, pairs, keys)
    return entry_pieces(rng, entries, [f"{key}:{value}\n" for key, value in entries.items()], queries)


def entry_pieces(rng: random.Random, entries: Mapping[str, str], lines: Sequence[str], queries: int) -> list[Piece]:
    """As kv_pieces, of entries that are told in these lines, in order.

    No key is asked for twice: the second answer could be copied from the first, which is not what the probe measures.
    """
    head, spans = with_spans(OPENING, lines)
    evidence = dict(zip(entries, spans, strict=True))
    pieces: list[Piece] = []
    for i, key in enumerate(rng.sample(list(entries), min(queries, len(entries)))):
        pieces += [((head if i == 0 else "\n") + ask(key), False), (entries[key], EvidenceSpan(*evidence[key]))]
    return pieces


def probe_pieces(probe: Probe | CompletionProbe, seed: int) -> list[Piece]:
    """One question of a probe, or one of its completions. The target is the right answer."""
    if isinstance(probe, CompletionProbe):
        completion = probe.completions(1, seed)[0]
        return [(completion.prompt, False), (completion.answer, True)]
    return question_pieces(probe.questions(1, seed)[0])


def question_pieces(question: Question) -> list[Piece]:
    """A question with its right answer, which is the target."""
    known = question.evidence is not None and question.spans
    evidence = EvidenceSpan(*question.spans[question.evidence]) if known else True  # type: ignore[index]
    return [(question.prompt, False), (question.choices[question.answer], evidence)]


def collate(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[list[Piece]]) -> tuple[Tensor, Tensor]:
    """Token ids and targets, both (batch, longest), padded on the right. targets[i] is what position i has to predict.

    As in the probes, the first piece of a sequence is tokenised with the special tokens that begin a text, and white space at
    the end of a piece that is no target goes to the next piece.
    """
    return _collated(tokenizer, sequences)[:2]


def collate_with_evidence(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[list[Piece]]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `collate`, and where the summary (models/tokens.py) of what each answer is read from stands, (batch, longest, 2): its
    first token and the one behind its last; twice the same where there is no target, or it is not known."""
    ids, targets, flags = _collated(tokenizer, sequences)
    evidence = torch.zeros(*ids.shape, 2, dtype=torch.long)
    for row, (pieces, answers) in enumerate(zip(sequences, flags, strict=True)):
        known = sorted({flag for flag in answers.values() if isinstance(flag, EvidenceSpan)})
        if not known:
            continue
        _, spans = token_spans(tokenizer, pieces[0][0], known)
        summaries = dict(zip(known, (summary(span, ids.shape[1]) for span in spans), strict=True))
        for place, flag in answers.items():
            if isinstance(flag, EvidenceSpan) and (places := summaries[flag]):
                evidence[row, place] = torch.tensor([places[0], places[-1] + 1])
    return ids, targets, evidence


def _collated(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[list[Piece]]
) -> tuple[Tensor, Tensor, list[dict[int, bool | EvidenceSpan]]]:
    """Ids and targets, and for every sequence the flags of the positions that have a target."""
    moved = [_moved(pieces) for pieces in sequences]
    openings = iter(encode_prompts(tokenizer, [pieces[0][0] for pieces in moved]))
    others = iter(encode_continuations(tokenizer, [pair for pieces in moved for pair in _pairs(pieces)]))
    ids, targets, flags = [], [], []
    for pieces in moved:
        row: list[int] = []
        labels: list[int] = []
        answers: dict[int, bool | EvidenceSpan] = {}
        for i, (_, is_target) in enumerate(pieces):
            tokens = next(others if i else openings)
            if is_target:
                answers |= dict.fromkeys(range(len(row) - 1, len(row) + len(tokens) - 1), is_target)
            row += tokens
            labels += tokens if is_target else [IGNORE] * len(tokens)
        ids.append(row)
        targets.append([*labels[1:], IGNORE])
        flags.append({place: flag for place, flag in answers.items() if place >= 0})
    return padded(ids, 0), padded(targets, IGNORE), flags


def _moved(pieces: Sequence[Piece]) -> list[Piece]:
    """The same text, with white space moved from the end of every piece that is no target to the next piece."""
    texts, flags = [text for text, _ in pieces], [is_target for _, is_target in pieces]
    for i in range(len(pieces) - 1):
        if not flags[i]:
            texts[i], texts[i + 1] = divided(texts[i], texts[i + 1])
    return list(zip(texts, flags, strict=True))


def _pairs(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every piece but the first, with all the text before it."""
    befores = accumulate(text for text, _ in pieces)
    return [(before, text) for before, (text, _) in zip(befores, pieces[1:], strict=False)]


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Rows of different lengths as one tensor (rows, longest), filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])
