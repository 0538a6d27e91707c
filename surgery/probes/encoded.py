"""Questions as rows of tokens for a model, and what its logits say of them.

The score of a choice is the summed log-probability of its tokens behind the prompt (the protocol of arXiv 2504.18574). If they
begin those of another choice, as "3" begins "31" where a digit is a token, the line break that ends it belongs to it.
A row is a prompt and as much of a choice as other tokens of it follow: where all choices are single tokens, a question has one
row. A question with one choice is open: its loss is that of writing the choice, among all texts, and it is right if greedy
decoding would write it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.modeling.reference import at_least_float32
from surgery.models.tokens import divided, encode_continuations, encode_prompts, summary, token_spans
from surgery.probes.question import Question


@dataclass(frozen=True)
class Encoded:
    """Questions as rows of token ids without padding, looked at where `points` says.

    points (p, 2): row and position of each distribution over the next token. terms (terms, 4): question, choice, point, token:
    the score of a choice is the sum of log p(token | point) over its terms. choices (questions,): how many each has. answers
    (questions,): the right one. owners (rows,): the question of a row. query (rows,): the position of the prompt's last token.
    ends: of each question, for each of its spans, the positions at which a model may hold what it has read there. evidence: of
    each question, which of its spans holds the answer, or None.
    """

    rows: list[list[int]]
    points: Tensor
    terms: Tensor
    choices: Tensor
    answers: Tensor
    owners: Tensor
    query: Tensor
    ends: list[list[list[int]]]
    evidence: list[int | None]

    def __len__(self) -> int:
        """How many questions there are."""
        return len(self.choices)

    def scores(self, logits: Tensor) -> Tensor:
        """logits (points, vocabulary) -> (questions, choices): summed log-probabilities in float32 at least, -inf where a
        question has fewer choices than another. Raises UserError where they are not finite."""
        question, choice, point, token = self.terms.to(logits.device).unbind(1)
        log_p = at_least_float32(logits).log_softmax(-1)[point, token]
        if not log_p.isfinite().all():
            raise UserError("the model's logits are not finite: NaN or infinite; try dtype=float32, or check its weights")
        width = int(self.choices.max())
        flat = log_p.new_zeros(len(self) * width).index_add(0, question * width + choice, log_p)
        absent = torch.arange(width, device=logits.device) >= self.choices.to(logits.device)[:, None]
        return flat.view(-1, width).masked_fill(absent, -torch.inf)

    def loss(self, logits: Tensor) -> Tensor:
        """(questions,): the negative log-probability, in nats, of the right choice among the choices, or, of an open question,
        among all texts."""
        scores = self.scores(logits)
        among = scores.logsumexp(-1) * (self.choices > 1).to(scores)
        return among - scores.gather(1, self.answers.to(logits.device)[:, None])[:, 0]

    def correct(self, logits: Tensor) -> Tensor:
        """(questions,) bool: whether the right choice has the largest score; of an open question, whether greedy decoding would
        write it."""
        question, _, point, token = self.terms.to(logits.device).unbind(1)
        wrong = (logits.argmax(-1)[point] != token).float()
        greedy = wrong.new_zeros(len(self)).index_add(0, question, wrong) == 0
        best = self.scores(logits).argmax(-1) == self.answers.to(logits.device)
        return torch.where((self.choices > 1).to(logits.device), best, greedy)

    def padded(self, device: torch.device | str = "cpu") -> Tensor:
        """(rows, longest): ids, padded on the right. What follows a token cannot change it in a causal model, so no mask is
        needed."""
        longest = max(map(len, self.rows))
        return torch.tensor([[*row, *([0] * (longest - len(row)))] for row in self.rows], device=device)

    def mask(self, place: str) -> Tensor:
        """(rows, longest) bool: the positions of a place in the text.

        query: the prompt's last token, and those of a choice behind it. spans: the ends of all spans. evidence: those of the
        span that holds the answer. elsewhere: all other tokens. everywhere: all tokens.
        """
        longest = max(map(len, self.rows))
        position = torch.arange(longest)
        tokens = position < torch.tensor([len(row) for row in self.rows])[:, None]
        query = tokens & (position >= self.query[:, None])
        if place in ("everywhere", "query"):
            return tokens if place == "everywhere" else query
        spans = torch.zeros_like(tokens)
        for row, owner in enumerate(self.owners.tolist()):
            ends, evidence = self.ends[owner], self.evidence[owner]
            chosen = ends if place != "evidence" else [] if evidence is None else [ends[evidence]]
            spans[row, [position for each in chosen for position in each]] = True
        spans &= ~query
        return tokens & ~query & ~spans if place == "elsewhere" else spans

    def out_of_order(self) -> "Encoded":
        """The same questions, with the tokens in the spans of each in reverse order: their records say nothing any more."""
        rows = []
        for row, owner in zip(self.rows, self.owners.tolist(), strict=True):
            places = sorted({place for ends in self.ends[owner] for place in ends if place < len(row) - 1})
            turned = dict(zip(places, [row[place] for place in reversed(places)], strict=True))
            rows.append([turned.get(place, token) for place, token in enumerate(row)])
        return replace(self, rows=rows)

    def part(self, chosen: Sequence[int]) -> "Encoded":
        """Some of the questions, in order."""
        number = torch.full((len(self),), -1)
        number[list(chosen)] = torch.arange(len(chosen))
        rows = (number[self.owners] >= 0).nonzero()[:, 0]
        row_number = torch.full((len(self.rows),), -1)
        row_number[rows] = torch.arange(len(rows))
        points = (row_number[self.points[:, 0]] >= 0).nonzero()[:, 0]
        point_number = torch.full((len(self.points),), -1)
        point_number[points] = torch.arange(len(points))
        terms = self.terms[number[self.terms[:, 0]] >= 0]
        return Encoded(
            rows=[self.rows[row] for row in rows.tolist()],
            points=torch.stack((row_number[self.points[points, 0]], self.points[points, 1]), 1),
            terms=torch.stack((number[terms[:, 0]], terms[:, 1], point_number[terms[:, 2]], terms[:, 3]), 1),
            choices=self.choices[list(chosen)],
            answers=self.answers[list(chosen)],
            owners=number[self.owners[rows]],
            query=self.query[rows],
            ends=[self.ends[q] for q in chosen],
            evidence=[self.evidence[q] for q in chosen],
        )

    def batches(self, batch_size: int, one_length: bool = False) -> Iterator[tuple[list[int], "Encoded"]]:
        """Questions of similar length together: (their indices, encoded). At most `batch_size` rows, or one question.
        one_length: the prompts of a batch have exactly one length."""
        rows: list[list[int]] = [[] for _ in range(len(self))]
        for row, owner in enumerate(self.owners.tolist()):
            rows[owner].append(row)
        lengths = [(int(self.query[own[0]]), max(len(self.rows[row]) for row in own)) for own in rows]
        chosen: list[int] = []
        for question in sorted(range(len(self)), key=lambda q: lengths[q]):
            full = sum(len(rows[q]) for q in chosen) + len(rows[question]) > batch_size
            if chosen and (full or (one_length and lengths[chosen[0]][0] != lengths[question][0])):
                yield chosen, self.part(chosen)
                chosen = []
            chosen.append(question)
        if chosen:
            yield chosen, self.part(chosen)


def encode(tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]) -> Encoded:
    """Tokenise prompts, with the special tokens that begin a text, and choices as they are divided behind the prompt.

    Raises UserError for an empty prompt, and for a choice that has no tokens of its own.
    """
    rows: list[list[int]] = []
    points: list[tuple[int, int]] = []
    terms: list[tuple[int, int, int, int]] = []
    owners: list[int] = []
    query: list[int] = []
    pairs = [[divided(question.prompt, choice) for choice in question.choices] for question in questions]
    prompts = list(dict.fromkeys(prompt for each in pairs for prompt, _ in each))
    prompt_ids = dict(zip(prompts, encode_prompts(tokenizer, prompts), strict=True))
    choice_ids = iter(encode_continuations(tokenizer, [pair for each in pairs for pair in each]))
    for q, question in enumerate(questions):
        texts = [next(choice_ids) for _ in question.choices]
        for (prompt, text), ids in zip(pairs[q], texts, strict=True):
            if not ids or not prompt_ids[prompt]:
                raise UserError(
                    f"'{(text if prompt else question.prompt)[:40]}' has no tokens of its own behind '{prompt[-20:]}'"
                )
        begun = [c for c, ids in enumerate(texts) if any(len(ids) < len(o) and o[: len(ids)] == ids for o in texts)]
        ended = encode_continuations(tokenizer, [(prompt, pairs[q][c][1] + "\n") for c in begun])
        for c, ids in zip(begun, ended, strict=True):
            texts[c] = ids
        opening = prompt_ids[prompt]
        prefixes = sorted({tuple(ids[:i]) for ids in texts for i in range(len(ids))})
        row_of: dict[tuple[int, ...], int] = {}
        for prefix, after in zip(prefixes, [*prefixes[1:], ()], strict=True):
            if after[: len(prefix)] != prefix or not after:  # nothing longer begins with it
                row_of |= {prefix[:i]: len(rows) for i in range(len(prefix) + 1)}
                rows.append([*opening, *prefix])
                owners.append(q)
                query.append(len(opening) - 1)
        point_of = {prefix: len(points) + i for i, prefix in enumerate(prefixes)}
        points += [(row_of[prefix], len(opening) - 1 + len(prefix)) for prefix in prefixes]
        terms += [(q, c, point_of[tuple(ids[:i])], token) for c, ids in enumerate(texts) for i, token in enumerate(ids)]
    ends: list[list[list[int]]] = []
    for question in questions:
        ids, spans = token_spans(tokenizer, question.prompt, question.spans) if question.spans else ([], [])
        ends.append([summary(span, len(ids)) for span in spans])
    return Encoded(
        rows=rows,
        points=torch.tensor(points).reshape(-1, 2),
        terms=torch.tensor(terms).reshape(-1, 4),
        choices=torch.tensor([len(question.choices) for question in questions]),
        answers=torch.tensor([question.answer for question in questions]),
        owners=torch.tensor(owners),
        query=torch.tensor(query),
        ends=ends,
        evidence=[question.evidence for question in questions],
    )
