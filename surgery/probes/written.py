"""Answers in what a model writes: greedy decoding, and which of the answers stand in it (probes that make `Writing`s)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.models.finite import explained, watching_logits
from surgery.models.tokens import encode_prompts
from surgery.probes.question import Writing
from surgery.runtime.progress import Track


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Writing], tokens: int) -> np.ndarray:
    """Of each the share of its answers, (asked,), that stand in what greedy decoding writes, whatever their case. tokens: of
    the prompts of a batch, at most, or one prompt. Raises NotFinite."""
    shares = np.zeros(len(asked))
    with torch.inference_mode(), explained(model), watching_logits(model):
        for chosen, rows in Track([*batches(tokenizer, asked, tokens)], "writing"):
            texts = Texts(tokenizer, [asked[i].answers for i in chosen], max(map(len, rows)))
            ids, real = _padded(rows, model.device)
            model.generate(  # type: ignore[operator]
                ids, attention_mask=real, generation_config=_greedy(model, tokenizer, asked[chosen[0]].tokens),
                stopping_criteria=[texts],
            )  # fmt: skip
            shares[chosen] = texts.shares
    return shares


def batches(
    tokenizer: PreTrainedTokenizerBase, asked: Sequence[Writing], tokens: int
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Prompts of similar length after which equally many tokens are written: (their indices, their token ids)."""
    rows = encode_prompts(tokenizer, [each.prompt for each in asked])
    order = sorted(range(len(asked)), key=lambda i: (asked[i].tokens, len(rows[i])))
    pending: list[int] = []
    for i in order:
        if pending and ((len(pending) + 1) * len(rows[i]) > tokens or asked[i].tokens != asked[pending[0]].tokens):
            yield pending, [rows[j] for j in pending]
            pending = []
        pending.append(i)
    if pending:
        yield pending, [rows[j] for j in pending]


def write_shapes(tokenizer: PreTrainedTokenizerBase, asked: Sequence[Writing], tokens: int) -> list[tuple[int, int]]:
    """(rows, tokens) of every forward of `write`, if no answer comes early."""
    shapes: list[tuple[int, int]] = []
    for chosen, rows in batches(tokenizer, asked, tokens):
        shapes += [(len(rows), max(map(len, rows))), *[(len(rows), 1)] * (asked[chosen[0]].tokens - 1)]
    return shapes


class Texts:
    """What has been written, row by row; a row is finished when all of its answers stand in it. shares: as far as it got."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answers: Sequence[tuple[str, ...]], start: int):
        self.tokenizer, self.start = tokenizer, start
        self.answers = [[answer.lower() for answer in each] for each in answers]
        self.shares = np.zeros(len(answers))

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        texts = self.tokenizer.batch_decode(ids[:, self.start :], skip_special_tokens=True)
        for i, (text, answers) in enumerate(zip(texts, self.answers, strict=True)):
            self.shares[i] = sum(answer in text.lower() for answer in answers) / len(answers)
        return torch.from_numpy(self.shares == 1).to(ids.device)


def _greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int) -> GenerationConfig:
    configured = getattr(model, "generation_config", None)
    ends = getattr(configured, "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    first = ends[0] if isinstance(ends, list) else ends
    return GenerationConfig(
        max_new_tokens=tokens, do_sample=False, num_beams=1, eos_token_id=ends, pad_token_id=first or 0, use_cache=True
    )


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows padded on the left, (rows, longest), and where they have tokens."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*[0] * (longest - len(row)), *row] for row in rows], device=device)
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
