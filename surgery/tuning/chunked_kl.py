"""KL(teacher || student) from hidden states, without ever holding the logits of all tokens.

Logits are the largest thing that a step makes: a number for every token and every word of the vocabulary. So they are made for
some tokens at a time, and used up at once: for the divergence, and for its gradient, which is p_student - p_teacher in the
logits and goes back through the head before the next tokens' turn. What is kept for the backward pass is as large as the hidden
states.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.divergence import kl_divergence

LOGITS = 2**19  # made at a time, about
TOKENS = 128  # at least: products of fewer rows waste a processor

Logits = Callable[[Tensor], Tensor]


def divergence(head: Logits, hidden: Tensor, vocabulary: int, teacher: Callable[[slice], Tensor]) -> Tensor:
    """The sum over tokens of KL(teacher || student), in nats.

    hidden (n, d): the student's last states; head: from some of them to logits (m, vocabulary). It may not learn: only `hidden`
    is given a gradient. teacher: the logits (m, vocabulary) of the tokens in a slice of range(n).
    """
    return _Divergence.apply(hidden, head, teacher, max(TOKENS, LOGITS // vocabulary))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Logits, teacher: Callable[[slice], Tensor], size: int) -> Tensor:
        learns = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if learns else None
        total = hidden.new_zeros((), dtype=torch.float)
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            with torch.set_grad_enabled(learns):
                states = hidden[part].detach().requires_grad_(learns)
                logits = head(states)
            found, of_logits = kl_divergence(logits.detach(), teacher(part))
            total += found
            if gradient is not None:
                gradient[part] = torch.autograd.grad(logits, states, of_logits)[0]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None
