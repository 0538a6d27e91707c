"""Asks a model questions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from surgery.probes.encoded import Encoded, encode
from surgery.probes.question import Question
from surgery.runtime.progress import bar

LOGITS = 2**26  # of one call of the model, at most: 256 MiB in float32


@dataclass(frozen=True)
class Answers:
    """correct (questions,) bool; loss (questions,) in nats. Both in the order of the questions."""

    correct: np.ndarray
    loss: np.ndarray


def answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question] | Encoded,
    batch_size: int = 64,
    what: str = "asking",
) -> Answers:
    """Ask a model. batch_size: rows of a forward pass, at most; the answers do not depend on it, but for rounding.

    Raises UserError where the model's logits are not finite.
    """
    encoded = questions if isinstance(questions, Encoded) else encode(tokenizer, questions)
    correct, loss = np.zeros(len(encoded), dtype=bool), np.zeros(len(encoded))
    with torch.no_grad():
        for chosen, part in bar(list(encoded.batches(batch_size)), what):
            logits = logits_at_points(model, part)
            correct[chosen] = part.correct(logits).cpu().numpy()
            loss[chosen] = part.loss(logits).cpu().numpy()
    return Answers(correct, loss)


def logits_at_points(model: nn.Module, encoded: Encoded) -> Tensor:
    """(points, vocabulary): the model's logits where a batch of questions is looked at. The head computes those positions alone
    at which some row is looked at."""
    device = next(model.parameters()).device
    positions, place = encoded.points[:, 1].unique(return_inverse=True)
    ids = encoded.padded(device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=positions.to(device)).logits
    return logits[encoded.points[:, 0].to(device), place.to(device)]
