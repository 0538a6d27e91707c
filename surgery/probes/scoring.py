"""Asks a model the questions of choice probes, and checks its completions.

The score of a candidate is the summed log-probability of its tokens after the prompt (the published protocol). A row of the
batch is a prompt plus a *proper prefix* of some candidate's tokens; its last position gives the log-probability of each
candidate's next token after that prefix. Candidates of a single token share one row, with the empty prefix.
"""

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
from surgery.models.tokens import divided, following, opening
from surgery.probes.question import Completion, Question


@dataclass(frozen=True)
class Encoded:
    """Tokenised questions as rows for the model.

    rows: token ids without padding. Candidate `c` of question `q` scores the sum of log p(token | row) over the terms (q, c,
    row, token). choices: candidates per question. answers: the right one.
    """

    rows: list[list[int]]
    terms: Tensor  # (terms, 4)
    choices: Tensor  # (questions,)
    answers: Tensor  # (questions,)

    def scores(self, logits: Tensor) -> Tensor:
        """logits (rows, vocabulary) -> summed log-probabilities (questions, choices), -inf where a question has fewer choices
        than another. Raises NotFinite."""
        question, choice, row, token = self.terms.to(logits.device).unbind(1)
        log_p = checked(logits.float().log_softmax(-1)[row, token], "the logits")
        width = int(self.choices.max())
        flat = log_p.new_zeros(len(self.choices) * width).index_add(0, question * width + choice, log_p)
        absent = torch.arange(width, device=logits.device) >= self.choices.to(logits.device)[:, None]
        return flat.view(-1, width).masked_fill(absent, -torch.inf)

    def losses(self, logits: Tensor) -> Tensor:
        """(questions,): the negative log-probability, in nats, of the right candidate among the candidates."""
        scores = self.scores(logits)
        return scores.logsumexp(-1) - scores.gather(1, self.answers.to(logits.device)[:, None])[:, 0]

    def correct(self, logits: Tensor) -> Tensor:
        """(questions,) bool: whether the largest score is the right candidate's."""
        return self.scores(logits).argmax(-1) == self.answers.to(logits.device)


@dataclass(frozen=True)
class Result:
    """correct (questions,) bool; loss (questions,) nats."""

    correct: np.ndarray
    loss: np.ndarray


def encode(tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]) -> Encoded:
    """Tokenise prompts (special tokens included), and candidates as they are divided behind the prompt (models/tokens.py)."""
    rows: list[list[int]] = []
    terms: list[tuple[int, int, int, int]] = []
    pairs = [(q.prompt, choice) for q in questions for choice in q.choices]
    following_ids = iter(zip(pairs, _tokens(tokenizer, pairs), strict=True))
    for q, question in enumerate(questions):
        row_of: dict[tuple[int, ...], int] = {}
        for c in range(len(question.choices)):
            (_, choice), (prompt, ids) = next(following_ids)
            if not ids:
                raise UserError(f"the candidate '{choice}' has no tokens of its own behind '{question.prompt[-20:]}'")
            for i, token in enumerate(ids):
                prefix = tuple(ids[:i])
                if prefix not in row_of:
                    row_of[prefix] = len(rows)
                    rows.append([*prompt, *prefix])
                terms.append((q, c, row_of[prefix], token))
    choices = torch.tensor([len(q.choices) for q in questions])
    return Encoded(rows, torch.tensor(terms), choices, torch.tensor([q.answer for q in questions]))


def _tokens(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """For each (prompt, text) the tokens of both."""
    split = [divided(*pair) for pair in pairs]
    prompts = [*dict.fromkeys(prompt for prompt, _ in split)]
    openings = dict(zip(prompts, opening(tokenizer, prompts), strict=True))
    if not all(openings.values()):
        raise UserError("a prompt is empty: there is nothing that a text could follow")
    return [(openings[prompt], ids) for (prompt, _), ids in zip(split, following(tokenizer, split), strict=True)]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, (rows, longest), and the index of each one's last token.

    What follows a token cannot change it in a causal model, so no mask is needed.
    """
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=device)
    return ids, torch.tensor([len(row) - 1 for row in rows], device=device)


def batches(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], batch_size: int
) -> Iterator[tuple[list[int], Encoded]]:
    """Questions of similar length together: (their indices, encoded). At most `batch_size` rows, or one question with more."""
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], batch_size: int = 64
) -> Result:
    """Ask a model. Raises NotFinite where its logits are NaN or infinite."""
    correct, loss = np.zeros(len(questions), dtype=bool), np.zeros(len(questions))
    with torch.no_grad():  # in inference mode FSDP makes tensors with which it cannot train afterwards
        for chosen, encoded in batches(tokenizer, questions, batch_size):
            logits = _next_logits(model, encoded.rows, batch_size)
            with explained(model, encoded.rows):
                correct[chosen] = encoded.correct(logits).cpu().numpy()
                loss[chosen] = encoded.losses(logits).cpu().numpy()
    return Result(correct, loss)


def _next_logits(model: PreTrainedModel, rows: list[list[int]], batch_size: int) -> Tensor:
    """(rows, vocabulary): what each row predicts next. A row that is the start of another is not run: the other one has its
    logits, too."""
    carriers = _carriers(rows)
    order: list[int] = []
    logits = []
    for run in _runs(carriers, batch_size):
        place = {carrier: i for i, carrier in enumerate(run)}
        carried = [row for row, carrier in enumerate(carriers) if carrier in place]
        ids, _ = padded([rows[carrier] for carrier in place], model.device)
        last = torch.tensor([len(rows[row]) - 1 for row in carried], device=ids.device)
        positions, where = last.unique(return_inverse=True)
        at = torch.tensor([place[carriers[row]] for row in carried], device=ids.device)
        for piece, predicted in logits_in_pieces(model, ids, positions):
            inside = ((where >= piece.start) & (where < piece.stop)).nonzero()[:, 0]
            logits.append(predicted[at[inside], where[inside] - piece.start])
            order += [carried[i] for i in inside.tolist()]
    return torch.cat(logits)[torch.tensor(order).argsort()]


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
        prompts, answers = zip(*_tokens(tokenizer, pairs), strict=True)
        if not all(answers):
            prompt, answer = pairs[answers.index([])]
            raise UserError(f"the answer '{answer}' has no tokens of its own behind '{prompt[-20:]}'")
        yield chosen, prompts, answers, [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, answers, strict=True)]
