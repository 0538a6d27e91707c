"""What every optimiser here is given: weight decay for matrices alone, and a learning rate that is never 0."""

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """The parameters that have a gradient, in at most two groups: those that decay, and those that do not.

    Matrices and convolution filters decay. What has one number a channel or a head does not: biases, norms, D, dt_bias, tau,
    gates, DoRA's sizes. Nor does A_log, which Mamba-1 has as a matrix: decay would pull the state's time scales to 1. These
    are the exceptions that Mamba's own code marks.
    """
    learning = [(name, p) for name, p in named if p.requires_grad]
    decaying = [p for name, p in learning if p.ndim >= 2 and name.rpartition(".")[2] != "A_log"]
    chosen = {id(p) for p in decaying}
    others = [p for _, p in learning if id(p) not in chosen]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def cosine_schedule(optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    """The learning rate as a share of the whole: 1 / warmup in the first step, 1 after `warmup` steps, then down along half a
    cosine, which would reach 0 one step after the last of all `steps`."""

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2

    return LambdaLR(optimizer, share)
