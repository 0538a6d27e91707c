"""Perplexity by a sliding window, as papers report it for long text.

The text is cut into strides of half a window. A row is two neighbouring strides, and only its second half is scored, so that
every scored token has at least half a window before it, and no token is scored twice.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.models.finite import checked, explained


def sliding_rows(windows: Tensor) -> Tensor:
    """(windows, window) token ids of running text -> (strides - 1, 2 * stride)."""
    stride = windows.shape[1] // 2
    ids = windows.flatten()
    strides = ids[: len(ids) // stride * stride].view(-1, stride)
    return torch.cat((strides[:-1], strides[1:]), 1)


def sliding_losses(model: PreTrainedModel, rows: Tensor, batch_size: int = 16) -> np.ndarray:
    """Mean negative log-likelihood (nats) per token of the second half, for every row."""
    stride, out = rows.shape[1] // 2, []
    with torch.inference_mode():
        for ids in rows.to(model.device).split(batch_size):
            keep = torch.arange(stride - 1, 2 * stride - 1, device=ids.device)
            log_p = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits.float().log_softmax(-1)
            with explained(model, ids):
                out.append(checked(-log_p.gather(-1, ids[:, stride:, None]).squeeze(-1).mean(1).cpu(), "the losses"))
    return torch.cat(out).numpy()
