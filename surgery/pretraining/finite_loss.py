"""A loss that is no number ends a training at once, and not when its model is measured."""

import math

from surgery.errors import UserError


def checked_loss(loss: float, step: int) -> float:
    """The loss of a step. Raises UserError where it is not finite."""
    if not math.isfinite(loss):
        raise UserError(f"pretrain: the loss is {loss} at step {step:,}; lower learning_rate, or raise warmup_steps")
    return loss
