"""The parameter groups and the schedule of all optimisers here: only matrices decay, and no step has a learning rate of 0."""

import math
from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """The parameters that have a gradient, in at most two groups: those with weight decay, and those without.

    Matrices and convolution filters decay. Parameters with one number for each channel or head do not: biases, norms, D,
    dt_bias, tau, gates. A_log does not decay either, although it is a matrix in Mamba-1: decay would pull
    the time scales of the state to 1. Mamba's own code makes the same exceptions.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    decaying = [p for name, p in trained if p.ndim >= 2 and name.rpartition(".")[2] != "A_log"]
    with_decay = {id(p) for p in decaying}
    others = [p for _, p in trained if id(p) not in with_decay]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def cosine_schedule(optimizer: Optimizer, warmup: int, steps: int, decay: float = 1.0) -> LambdaLR:
    """The learning rate as a share of its maximum: 1 / warmup in the first step, 1 after `warmup` steps, then half a cosine
    that would reach 0 one step after the last of `steps`. (transformers' schedule begins with a step at 0.) decay: the share of
    the steps over which it falls, if that is less than what the warm-up leaves."""
    return falling_schedule(optimizer, warmup, lambda: (steps - round(decay * steps), steps))


def falling_schedule(optimizer: Optimizer, warmup: int, span: Callable[[], tuple[int, int] | None]) -> LambdaLR:
    """As cosine_schedule. span: the step from which the learning rate falls, and that at which it would be 0; None while it is
    not to fall yet."""

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        falling = span()
        if falling is None or step < falling[0]:
            return 1.0
        first, end = max(warmup, falling[0]), falling[1]
        return (1 + math.cos(math.pi * (step - first) / max(1, end - first))) / 2

    return LambdaLR(optimizer, share)
