"""The suite language: perplexity by a sliding window, as papers report it for long text.

The text is cut into strides of half a window. A row is two neighbouring strides, and only its second half is scored, so that
every scored token has at least half a window before it, and no token is scored twice.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.evaluation.suites import measured
from surgery.evaluation.task import Task
from surgery.evaluation.texts import text_tasks
from surgery.probes.perplexity import text_losses
from surgery.records.recipe import Bench, Data

PLACE = 40
SUITES = {"language": "Perplexity by a sliding window."}
LOSSES = ("sliding",)


def names(options: Bench) -> list[str]:
    return ["sliding"] if "language" in measured(options) else []


def tasks(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
    if "language" not in measured(options):
        return []
    return text_tasks("sliding", sliding_rows, sliding_losses, options, tokenizer, data, seed)


def sliding_rows(windows: Tensor) -> Tensor:
    """(windows, window) token ids of running text -> (strides - 1, 2 * stride)."""
    stride = windows.shape[1] // 2
    ids = windows.flatten()
    strides = ids[: len(ids) // stride * stride].view(-1, stride)
    return torch.cat((strides[:-1], strides[1:]), 1)


def sliding_losses(model: PreTrainedModel, rows: Tensor, batch_size: int = 16) -> np.ndarray:
    """Mean negative log-likelihood (nats) per token of the second half, for every row."""
    return text_losses(model, rows, rows.shape[1] // 2, batch_size)
