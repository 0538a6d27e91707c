"""The harness's way to ask a model, without the logits of whole batches.

It takes the logits of every token of a batch and reads those of the continuations, which are the last tokens of a row. Of 64
prompts of 700 tokens and 65,024 words, those would be 11.7 GB, twice. It already allows for a model that gives fewer logits
than it was given tokens (prompt tuning), so the ones before the first continuation can be left out.
"""

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor


class Ends(HFLM):
    """HFLM, with logits from the first place on that may belong to a continuation."""

    longest = 0  # continuation, in tokens, of those that are asked

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        self.longest = max((len(continuation) for _, _, continuation in requests), default=0)
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """inps (b, t), zeros on padding, on the right. Returns logits (b, the last places, vocabulary)."""
        places = torch.arange(inps.shape[1], device=inps.device)
        lengths = ((inps != 0) * (places + 1)).amax(1)  # or fewer: a token may be number 0, too
        first = max(0, int(lengths.min()) - self.longest)
        with torch.no_grad():
            return self.model(inps, logits_to_keep=places[first:]).logits
