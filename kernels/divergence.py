"""The Kullback-Leibler divergence of a student's predictions from its teacher's, and its gradient.

    KL = sum_w p_w (log p_w - log q_w)        dKL/dlogits_w = q_w - p_w        p = softmax(teacher), q = softmax(student)

There is a logit for every token and every word of the vocabulary, and an intermediate result of that size takes more memory
than the rest of a step of tuning. `native` (divergence.c) is ours, in C for a CPU, and stores none; `stock` is a few operations
of PyTorch; `reference` writes the formulas down.
"""

import torch
from torch import Tensor

from surgery.kernels.dispatch import Backend, Operation
from surgery.kernels.functions import seeded
from surgery.kernels.native import ALONE, Workspace, check, contiguous, fields
from surgery.kernels.native import refuses as not_here
from surgery.kernels.operators import Signature


def kl_divergence(student: Tensor, teacher: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """student, teacher: logits (tokens, words). Returns the sum over tokens of KL(teacher || student), in nats, in float32 at
    least, and its gradient in the student's logits, (tokens, words) in their dtype. Neither has a gradient of its own."""
    with torch.no_grad():
        return KL_DIVERGENCE(student, teacher, backend=backend)


class _Divergence(Workspace):
    """`divergence` in divergence.c."""

    file = "divergence"
    _fields_ = fields("tokens words", "student teacher gradient divergence")


def _refuses(student: Tensor, teacher: Tensor) -> str | None:
    return not_here(student, teacher) or (None if student.numel() else "there is nothing to compute")


def _native(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    check((teacher, (n := len(student), words := student.shape[1])))
    own, target = contiguous(student.float(), teacher.float())
    gradient, sums = torch.empty_like(own), own.new_empty(n, dtype=torch.double)
    work = _Divergence(n, words, student=own, teacher=target, gradient=gradient, divergence=sums)
    work.run("diverge", 1 if own.numel() <= ALONE else n)
    return sums.sum().float(), gradient.to(student.dtype)


def _stock(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    least = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = teacher.to(least).log_softmax(-1), student.to(least).log_softmax(-1)
    p = log_p.exp()
    total = torch.dot(p.flatten(), log_p.sub_(log_q).flatten())
    return total, log_q.exp_().sub_(p).to(student.dtype)


def _reference(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    p, q = teacher.softmax(-1), student.softmax(-1)
    return (p * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(), q - p


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    student, teacher = torch.randn(2, 4, 50, **seeded()).to(device, dtype)
    return student, teacher


KL_DIVERGENCE = Operation(
    "kl_divergence",
    Backend("native", _native, _refuses, probed=True, opaque=True),
    Backend("stock", _stock),
    Backend("reference", _reference),
    example=_example,
    differentiable=False,
    signature=Signature(
        ("Tensor student", "Tensor teacher"),
        2,
        lambda student, teacher: [((), torch.promote_types(student.dtype, torch.float32)), (student.shape, student.dtype)],
    ),
)
