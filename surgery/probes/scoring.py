"""Asks a model the questions of choice probes and for tokens of running text, and checks its completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.models.finite import checked, explained
from surgery.models.pieces import logits_in_pieces
from surgery.probes.encoded import Asked, Encoded, EncodedPassages, encode, padded, tokens_of
from surgery.probes.question import Completion, Passage, Question

REMEMBERED = 2**20  # tokens of questions, which are Python's numbers: 36 MiB
_last: tuple[PreTrainedTokenizerBase, tuple[Asked, ...], int, list[tuple[list[int], Encoded]]] | None = None


@dataclass(frozen=True)
class Result:
    """correct (questions,) bool, or of passages (passages,) numbers (EncodedPassages); loss (questions,) nats."""

    correct: np.ndarray
    loss: np.ndarray


def batches(tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked], batch_size: int) -> Iterator[tuple[list[int], Encoded]]:
    """Questions of similar length together: (their indices, encoded). At most `batch_size` rows, or one question with more. Of
    passages, all have one length. The last tuple of questions is remembered, since several models are asked the same."""
    global _last  # noqa: PLW0603
    if _last is not None and _last[0] is tokenizer and _last[1] is asked and _last[2] == batch_size:
        yield from _last[3]
        return
    tokens, made = 0, []
    for each in _batches(tokenizer, asked, batch_size):
        tokens += sum(map(len, each[1].rows))
        made.append(each)
        if tokens > REMEMBERED:
            made.clear()
        yield each
    _last = (tokenizer, asked, batch_size, made) if isinstance(asked, tuple) and tokens <= REMEMBERED else None


def _batches(
    tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked], batch_size: int
) -> Iterator[tuple[list[int], Encoded]]:
    questions = [each for each in asked if isinstance(each, Question)]
    if len(questions) < len(asked):
        passages = [each for each in asked if isinstance(each, Passage)]
        for start in range(0, len(passages), batch_size):
            chosen = list(range(start, min(start + batch_size, len(passages))))
            yield chosen, EncodedPassages.of([passages[i] for i in chosen])
        return
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].prompt))
    pending = [order[start : start + batch_size] for start in range(0, len(order), batch_size)][::-1]
    while pending:
        chosen = pending.pop()
        encoded = encode(tokenizer, [questions[i] for i in chosen])
        if len(encoded.rows) <= batch_size or len(chosen) == 1:
            yield chosen, encoded
        else:
            half = len(chosen) // 2
            pending += [chosen[half:], chosen[:half]]


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Asked], batch_size: int = 64
) -> Result:
    """Ask a model. Raises NotFinite where its logits are NaN or infinite."""
    decisions = all(isinstance(question, Question) for question in questions)
    correct, loss = np.zeros(len(questions), dtype=bool if decisions else float), np.zeros(len(questions))
    with torch.no_grad():  # in inference mode FSDP makes tensors with which it cannot train afterwards
        for chosen, encoded in batches(tokenizer, questions, batch_size):
            logits = _logits(model, encoded, batch_size)
            with explained(model, encoded.rows):
                correct[chosen] = encoded.correct(logits).cpu().numpy()
                loss[chosen] = encoded.losses(logits).cpu().numpy()
    return Result(correct, loss)


def _logits(model: PreTrainedModel, encoded: Encoded, batch_size: int) -> Tensor:
    """(logits, vocabulary) at the places of a batch. A row that is the start of another is not run: the other one has its
    logits, too."""
    rows, carriers = encoded.rows, _carriers(encoded.rows)
    in_rows, positions = encoded.target_positions()
    carrier_of = torch.tensor(carriers)[in_rows]
    order: list[Tensor] = []
    logits = []
    for run in _runs(carriers, batch_size):
        place = torch.full((len(rows),), -1)
        place[run] = torch.arange(len(run))
        carried = (place[carrier_of] >= 0).nonzero()[:, 0]
        ids, _ = padded([rows[carrier] for carrier in run], model.device)
        at, (needed, where) = place[carrier_of[carried]], positions[carried].unique(return_inverse=True)
        for piece, predicted in logits_in_pieces(model, ids, needed.to(ids.device)):
            inside = ((where >= piece.start) & (where < piece.stop)).nonzero()[:, 0]
            logits.append(predicted[at[inside].to(predicted.device), (where[inside] - piece.start).to(predicted.device)])
            order.append(carried[inside])
    return torch.cat(logits)[torch.cat(order).argsort().to(logits[0].device)]


def _runs(carriers: list[int], batch_size: int) -> Iterator[list[int]]:
    """The rows of each forward."""
    forwarded = sorted(set(carriers))
    for start in range(0, len(forwarded), batch_size):
        yield forwarded[start : start + batch_size]


def answer_shapes(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], batch_size: int = 64
) -> list[tuple[int, int]]:
    """(rows, tokens) of every forward of `answer`."""
    shapes = []
    for _, encoded in batches(tokenizer, questions, batch_size):
        for run in _runs(_carriers(encoded.rows), batch_size):
            shapes.append((len(run), max(len(encoded.rows[carrier]) for carrier in run)))
    return shapes


def _carriers(rows: list[list[int]]) -> list[int]:
    """For each row, the index of a longest row that starts with it: mostly its own."""
    order = sorted(range(len(rows)), key=lambda i: rows[i])  # a row that starts with another follows it directly
    carriers = list(range(len(rows)))
    for row, after in reversed(list(pairwise(order))):
        if rows[after][: len(rows[row])] == rows[row]:
            carriers[row] = carriers[after]
    return carriers


def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion], batch_size: int = 64
) -> Result:
    """Whether greedy decoding would write each answer exactly; the loss is the mean over the answer's tokens.

    One forward over prompt and answer decides it: the answer would be written if and only if each of its tokens is the argmax
    after the prompt and the answer's tokens before it. As long as greedy decoding has been right, it has read just these
    tokens; from its first wrong token on it reads others, but then the outcome is settled.
    """
    correct, loss = np.zeros(len(completions), dtype=bool), np.zeros(len(completions))
    with torch.inference_mode():
        for chosen, prompts, answers, rows in _written(tokenizer, completions, batch_size):
            ids, last = padded(rows, model.device)
            first = min(map(len, prompts)) - 1  # the first position that predicts a token of an answer
            positions = torch.arange(first, ids.shape[1], device=ids.device)
            ends = (last - first + 1).tolist()  # of the positions that predict a row's answer
            parts: list[list[Tensor]] = [[] for _ in chosen]
            for piece, logits in logits_in_pieces(model, ids, positions):
                for part, tokens, row, end in zip(parts, answers, logits, ends, strict=True):
                    low, high = max(end - len(tokens), piece.start), min(end, piece.stop)
                    part.append(row[low - piece.start : max(low, high) - piece.start].to(torch.float, copy=True))
            for i, tokens, part in zip(chosen, answers, parts, strict=True):
                predicting = torch.cat(part)
                expected = torch.tensor(tokens, device=ids.device)
                correct[i] = bool((predicting.argmax(-1) == expected).all())
                loss[i] = torch.nn.functional.cross_entropy(predicting, expected).item()
            with explained(model, rows):
                checked(torch.from_numpy(loss[chosen]), "the logits")
    return Result(correct, loss)


def complete_shapes(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion], batch_size: int = 64
) -> list[tuple[int, int]]:
    """(rows, tokens) of every forward of `complete`."""
    return [(len(rows), max(map(len, rows))) for *_, rows in _written(tokenizer, completions, batch_size)]


def _written(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion], batch_size: int
) -> Iterator[tuple[list[int], tuple[list[int], ...], tuple[list[int], ...], list[list[int]]]]:
    """The completions of each forward: (their indices, prompts, answers, and rows of both without the last token)."""
    order = sorted(range(len(completions)), key=lambda i: len(completions[i].prompt) + len(completions[i].answer))
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        pairs = [(completions[i].prompt, completions[i].answer) for i in chosen]
        prompts, answers = zip(*tokens_of(tokenizer, pairs), strict=True)
        if not all(answers):
            prompt, answer = pairs[answers.index([])]
            raise UserError(f"the answer '{answer}' has no tokens of its own behind '{prompt[-20:]}'")
        yield chosen, prompts, answers, [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, answers, strict=True)]
