"""Questions and passages as rows of tokens for a model, and what its logits say of them.

The score of a candidate is the summed log-probability of its tokens after the prompt (the published protocol). A row of the
batch is a prompt plus a *proper prefix* of some candidate's tokens; its last position gives the log-probability of each
candidate's next token after that prefix. Candidates of a single token share one row, with the empty prefix. A passage is a row
of its own, in which the tokens that are asked for have all of the vocabulary as candidates.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.models.finite import checked
from surgery.models.tokens import divided, encode_continuations, encode_prompts
from surgery.probes.question import Passage, Question

Asked = Question | Passage


@dataclass(frozen=True)
class Encoded(ABC):
    """What a model is asked, as rows of token ids without padding. It is looked at where `places` says."""

    rows: list[list[int]]

    @abstractmethod
    def __len__(self) -> int:
        """How many questions or passages they are."""

    @abstractmethod
    def target_positions(self) -> tuple[Tensor, Tensor]:
        """(row, position) of the logits that are needed, (logits,) each."""

    @abstractmethod
    def losses(self, logits: Tensor) -> Tensor:
        """(len,): the loss (nats) of each, from logits (logits, vocabulary)."""

    @abstractmethod
    def correct(self, logits: Tensor) -> Tensor:
        """(len,): how far each is right, from logits (logits, vocabulary)."""

    @abstractmethod
    def owners(self) -> Tensor:
        """(rows,): the question or passage to which a row belongs."""

    @abstractmethod
    def part(self, begin: int, end: int) -> "Encoded":
        """Those from `begin` to before `end`."""

    @abstractmethod
    def seen(self) -> list[Any]:
        """All that identifies them, as JSON."""


@dataclass(frozen=True)
class EncodedQuestions(Encoded):
    """Questions. Candidate `c` of question `q` scores the sum of log p(token | row) over the terms (q, c,
    row, token). choices: candidates per question. answers: the right one.
    """

    terms: Tensor  # (terms, 4)
    choices: Tensor  # (questions,)
    answers: Tensor  # (questions,)

    def __len__(self) -> int:
        return len(self.choices)

    def target_positions(self) -> tuple[Tensor, Tensor]:
        """Each row's last token."""
        return torch.arange(len(self.rows)), torch.tensor([len(row) - 1 for row in self.rows])

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

    def owners(self) -> Tensor:
        """One with candidates of several tokens owns several rows."""
        owners = torch.empty(len(self.rows), dtype=torch.long)
        owners[self.terms[:, 2]] = self.terms[:, 0]
        return owners

    def part(self, begin: int, end: int) -> "EncodedQuestions":
        owners = self.owners()
        chosen = ((owners >= begin) & (owners < end)).nonzero()[:, 0].tolist()
        place = torch.full((len(owners),), -1)
        place[chosen] = torch.arange(len(chosen))
        question, choice, row, token = self.terms[(self.terms[:, 0] >= begin) & (self.terms[:, 0] < end)].unbind(1)
        terms = torch.stack([question - begin, choice, place[row], token], 1)
        return EncodedQuestions([self.rows[i] for i in chosen], terms, self.choices[begin:end], self.answers[begin:end])

    def seen(self) -> list[Any]:
        return [self.rows, self.terms.tolist(), self.choices.tolist(), self.answers.tolist()]


@dataclass(frozen=True)
class EncodedPassages(Encoded):
    """Passages, one a row. targets (targets, 3): row, and the token that is asked for and its place. weights (rows,): see
    Passage."""

    targets: Tensor
    weights: Tensor

    @classmethod
    def of(cls, passages: Sequence[Passage]) -> "EncodedPassages":
        targets = [(row, passage.ids[place], place) for row, passage in enumerate(passages) for place, _ in passage.hits]
        weights = torch.tensor([passage.weight for passage in passages], dtype=torch.float64)
        return cls([list(passage.ids) for passage in passages], torch.tensor(targets), weights)

    def __len__(self) -> int:
        return len(self.rows)

    def target_positions(self) -> tuple[Tensor, Tensor]:
        """The tokens before those that are asked for."""
        return self.targets[:, 0], self.targets[:, 2] - 1

    def losses(self, logits: Tensor) -> Tensor:
        """(rows,): the weighted sum of the tokens' negative log-probabilities. Raises NotFinite."""
        log_p = logits.float().log_softmax(-1).gather(-1, self._tokens(logits)[:, None])[:, 0]
        return self._summed(-checked(log_p, "the logits"))

    def correct(self, logits: Tensor) -> Tensor:
        """(rows,): the weighted number of tokens that greedy decoding would write."""
        return self._summed((logits.argmax(-1) == self._tokens(logits)).float())

    def _tokens(self, logits: Tensor) -> Tensor:
        return self.targets[:, 1].to(logits.device)

    def _summed(self, values: Tensor) -> Tensor:
        rows = self.targets[:, 0].to(values.device)
        return values.new_zeros(len(self)).index_add(0, rows, values * self.weights.to(values)[rows])

    def owners(self) -> Tensor:
        return torch.arange(len(self.rows))

    def part(self, begin: int, end: int) -> "EncodedPassages":
        mine = (self.targets[:, 0] >= begin) & (self.targets[:, 0] < end)
        targets = self.targets[mine] - torch.tensor([begin, 0, 0])
        return EncodedPassages(self.rows[begin:end], targets, self.weights[begin:end])

    def seen(self) -> list[Any]:
        return [self.rows, self.targets.tolist(), self.weights.tolist()]


def encode(tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]) -> EncodedQuestions:
    """Tokenise prompts (special tokens included), and candidates as they are divided behind the prompt (models/tokens.py)."""
    rows: list[list[int]] = []
    terms: list[tuple[int, int, int, int]] = []
    pairs = [(q.prompt, choice) for q in questions for choice in q.choices]
    following_ids = iter(zip(pairs, tokens_of(tokenizer, pairs), strict=True))
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
    return EncodedQuestions(rows, torch.tensor(terms), choices, torch.tensor([q.answer for q in questions]))


def tokens_of(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """For each (prompt, text) the tokens of both."""
    split = [divided(*pair) for pair in pairs]
    prompts = [*dict.fromkeys(prompt for prompt, _ in split)]
    openings = dict(zip(prompts, encode_prompts(tokenizer, prompts), strict=True))
    if not all(openings.values()):
        raise UserError("a prompt is empty: there is nothing that a text could follow")
    return [(openings[prompt], ids) for (prompt, _), ids in zip(split, encode_continuations(tokenizer, split), strict=True)]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, (rows, longest), and the index of each one's last token.

    What follows a token cannot change it in a causal model, so no mask is needed.
    """
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=device)
    return ids, torch.tensor([len(row) - 1 for row in rows], device=device)
