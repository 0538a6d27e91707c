"""Held-out text as rows of tokens: what a model loses on each token of them, where its grafts act, and how far its predictions
move from the base's."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.statistics import estimate
from surgery.modeling.graft import Graft, watched
from surgery.probes.scoring import LOGITS
from surgery.probes.toy import document
from surgery.records.ranking import Estimate
from surgery.records.recipe import TOY, Data
from surgery.records.report import OnText
from surgery.tuning.text import open_text

CHARACTERS = 16  # tokenised for each token that is wanted; the whole text where these are too few


@dataclass(frozen=True)
class HeldOutText:
    """documents: the token ids of each, (t,)."""

    name: str
    documents: tuple[np.ndarray, ...]

    def rows(self, count: int, tokens: int) -> tuple[Tensor, np.ndarray]:
        """ids (rows, tokens), at most `count` of them, and to which document each belongs, (rows,).

        Where two documents or more are as long as a row, rows are taken from each in turn, from its beginning on. Otherwise all
        documents are one running text, and every row of it counts as a document. Raises UserError where the text is shorter
        than a row.
        """
        cut = [ids[: len(ids) // tokens * tokens].reshape(-1, tokens) for ids in self.documents]
        cut = [rows for rows in cut if len(rows)]
        if len(cut) < 2:
            ids = np.concatenate(self.documents)
            cut = list(ids[: len(ids) // tokens * tokens].reshape(-1, 1, tokens))[:count]
        if not cut:
            raise UserError(f"{self.name} has {sum(map(len, self.documents))} tokens; a row takes {tokens}")
        places = [(turn, owner) for owner, rows in enumerate(cut) for turn in range(len(rows))]
        chosen = sorted(places)[:count]
        rows = np.stack([cut[owner][turn] for turn, owner in chosen])
        return torch.from_numpy(rows), np.array([owner for _, owner in chosen])


def open_held_out(tokenizer: PreTrainedTokenizerBase, data: Data, tokens: int | None, seed: int) -> HeldOutText:
    """data.held_out_text in tokens: at least so many where there are so many, None for all. seed: of the toy data."""
    if data.held_out_text == TOY:
        rng, ids = random.Random(f"perplexity {seed}"), list[int]()
        while len(ids) < (tokens or 0):
            text = (tokenizer.eos_token or "") + document(rng, held_out=True)
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        return HeldOutText("the built-in toy data", (np.array(ids),))
    (source,) = open_text([data.held_out_text], data.column)
    texts = [text for text in source.documents if text.strip()]
    limit = None if tokens is None else CHARACTERS * tokens
    documents = [_tokenize(tokenizer, text[:limit]) for text in texts]
    if tokens is not None and sum(map(len, documents)) < tokens:
        documents = [_tokenize(tokenizer, text) for text in texts]
    return HeldOutText(data.held_out_text, tuple(documents))


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return np.array(ids, dtype=np.int64)


def rows_at_once(model: Any, length: int, rows: int) -> int:
    """How many rows of a length, at most `rows`, go through a model at once, so that their logits fit."""
    return max(1, min(rows, LOGITS // (length * model.config.get_text_config().vocab_size)))


@torch.inference_mode()
def row_logits(model: Any, rows: Tensor, batch: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(which rows, their ids, their logits (b, t, vocabulary)) of rows (n, t)."""
    batch = rows_at_once(model, rows.shape[1], batch)
    for start in range(0, len(rows), batch):
        ids = rows[start : start + batch].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits
        yield slice(start, start + len(ids)), ids.to(logits.device), logits


def token_losses(model: Any, rows: Tensor, batch: int) -> np.ndarray:
    """The negative log-likelihood, in nats, of each token but the first, (n, t - 1), of rows (n, t). Raises UserError where it
    is not finite."""
    losses = np.empty((len(rows), rows.shape[1] - 1))
    for part, ids, logits in row_logits(model, rows, batch):
        log_p = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        losses[part] = -log_p.double().cpu().numpy()
    if not np.isfinite(losses).all():
        raise UserError("the model's loss on text is not finite; try dtype=float32, or check its weights")
    return losses


def by_document(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Values (rows, t) -> the mean over each document's tokens, (documents,)."""
    return np.array([values[owner == each].mean() for each in range(int(owner.max()) + 1)])


@torch.inference_mode()
def measure_on_text(base: Any, model: Any, rows: Tensor, owner: np.ndarray, batch: int) -> OnText:
    """Compare a model with its base on rows of text (n, t), of which each belongs to the document owner[row].

    base: in the same code and precision as the model, so that equal numbers are equal bit for bit (splice.adopt gives it).
    """
    grafts = [module for module in model.modules() if isinstance(module, Graft)]
    kl, acts = np.zeros(tuple(rows.shape)), np.zeros(tuple(rows.shape))
    same, before = np.ones(len(rows), dtype=bool), 0.0
    shares: list[Tensor] = []  # of each graft, (b, t, heads), of the last forward
    batch = rows_at_once(model, rows.shape[1], batch)
    for start in range(0, len(rows), batch):
        ids, part = rows[start : start + batch].to(model.device), slice(start, start + batch)
        expected = base(input_ids=ids, use_cache=False).logits
        shares.clear()
        with watched(grafts, lambda _, m: shares.append(m)):
            logits = model(input_ids=ids, use_cache=False).logits.to(expected.device)
        log_p, log_q = expected.float().log_softmax(-1), logits.float().log_softmax(-1)
        kl[part] = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).double().cpu().numpy()
        change = (logits.float() - expected.float()).abs().amax(-1).cpu()
        same[part] = (change == 0).all(1).numpy()
        if grafts:
            is_open = torch.stack([(m > 0).any(-1).cpu() for m in shares]).any(0)
            acts[part] = is_open.numpy()
            before = max(before, float((change * (is_open.cumsum(1) == 0)).max()))
    untouched = [bool(same[owner == each].all()) for each in range(int(owner.max()) + 1)]
    return OnText(
        kl=_within(estimate(by_document(kl, owner), decisions=False), np.inf),
        documents=len(untouched),
        tokens=rows.numel(),
        untouched=sum(untouched),
        acts=_within(estimate(by_document(acts, owner), decisions=False), 1.0) if grafts else None,
        change_before=before if grafts else None,
    )


def _within(found: Estimate, most: float) -> Estimate:
    """An estimate whose interval stays where values can be: from 0 on."""
    return found.model_copy(update={"low": max(found.low, 0.0), "high": min(found.high, most)})
