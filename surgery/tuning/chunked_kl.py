"""KL(teacher || student) from hidden states, without ever holding the logits of all tokens.

Logits are the largest tensors of a step: a number for every token and every word of the vocabulary. They are therefore computed
for a chunk of tokens at a time, which yields the divergence and its gradient at once. The gradient with respect to the logits
is p_student - p_teacher; it goes back through the head before the next chunk is computed. What is kept for the backward pass
has the size of the hidden states.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.divergence import kl_divergence

LOGITS = 2**19  # of a chunk, about
TOKENS = 128  # of a chunk, at least: matrix products of fewer rows are slow

Logits = Callable[[Tensor], Tensor]


def chunked_kl_divergence(head: Logits, hidden: Tensor, vocabulary: int, teacher: Callable[[slice], Tensor]) -> Tensor:
    """The sum over tokens of KL(teacher || student), in nats.

    hidden (n, d): the student's last states. head: maps m of them to logits (m, vocabulary). Only `hidden` gets a gradient, so
    the head must not be trained. teacher: maps a slice of range(n) to the teacher's logits of these tokens, (m, vocabulary).
    """
    return _ChunkedKL.apply(hidden, head, teacher, max(TOKENS, LOGITS // vocabulary))


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Logits, teacher: Callable[[slice], Tensor], size: int) -> Tensor:
        needs_grad = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if needs_grad else None
        total = hidden.new_zeros((), dtype=torch.float)
        for first in range(0, len(hidden), size):
            chunk = slice(first, first + size)
            with torch.set_grad_enabled(needs_grad):
                states = hidden[chunk].detach().requires_grad_(needs_grad)
                logits = head(states)
            divergence, logits_gradient = kl_divergence(logits.detach(), teacher(chunk))
            total += divergence
            if gradient is not None:
                gradient[chunk] = torch.autograd.grad(logits, states, logits_gradient)[0]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None
