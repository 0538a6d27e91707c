"""The cross-entropy of next tokens with its gradient, without ever holding the logits of all tokens.

Logits are the largest tensors of a step, and what is done to them would go through memory many times. Here they are computed
for a few tokens at a time, and turned into the loss and the gradient while they are in the processor's cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = 2**20  # of a part, about
TOKENS = 128  # of a part, at least: matrix products of fewer rows are slow


def mean_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens of their negative log-probability, in nats.

    hidden (n, d): last states. weight (vocabulary, d): of the head. targets (n,): the token that follows each. Products are
    computed in the dtype of autocast, where it is on, and summed in float32 at least.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(kind, enabled=False):
        return _CrossEntropy.apply(hidden, weight, targets, dtype, learns)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, learns: bool) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        by_hidden = torch.empty_like(hidden) if learns else None
        by_weight = torch.zeros_like(weight, dtype=wide) if learns else None
        head, total = weight.to(dtype), hidden.new_zeros((), dtype=torch.double)
        for part in torch.arange(len(hidden)).split(max(TOKENS, LOGITS // len(weight))):
            chosen = slice(int(part[0]), int(part[-1]) + 1)
            states, right = hidden[chosen].to(dtype), targets[chosen, None]
            logits = (states @ head.t()).to(wide)
            norms = logits.logsumexp(1, keepdim=True)
            total += (norms - logits.gather(1, right)).sum()
            if by_hidden is not None and by_weight is not None:
                gradient = logits.sub_(norms).exp_()  # softmax
                gradient.scatter_add_(1, right, gradient.new_full((1, 1), -1.0).expand(len(right), 1))
                narrow = gradient.to(dtype)
                by_hidden[chosen] = narrow @ head
                by_weight += narrow.t() @ states
        ctx.save_for_backward(by_hidden, by_weight)
        ctx.count, ctx.dtypes = len(hidden), (hidden.dtype, weight.dtype)
        return (total / len(hidden)).to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        share = upstream / ctx.count
        by_hidden, by_weight = ((m * share).to(dtype) for m, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return by_hidden, by_weight, None, None, None
