"""The learning rate, and tune.steps=auto: when the loss on examples that are kept back is flat, and when the steps then end.

The loss falls once more while the learning rate does, so a curve under a rate that already falls says nothing on whether more
steps would help. So the rate stays until the curve is flat, and falls after that. A curve of means goes up and down by chance;
a measurement counts as progress only where the interval of its difference to the best before, batch by batch, leaves out 0, and
where the difference is worth the steps.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from surgery.evaluation.statistics import difference
from surgery.records.recipe import Tune

EVAL_STEPS = 25  # the loss is measured after every so many steps
EXAMPLES = 128  # sequences of each measurement
LEAST_GAIN = 0.02  # progress is a loss below the best so far by this share of it
PATIENCE = 2  # measurements without progress, after which the curve is flat
FALL = 0.25  # the share of all steps over which the learning rate falls, where steps is auto


class Watcher:
    """Says the learning rate of a step, and whether it was the last.

    measure: gives the losses on examples that are kept back, (batches,) in nats; it is called where steps is auto. flat: the
    step after which the learning rate falls; None before that is known.
    """

    def __init__(self, options: Tune, measure: Callable[[], np.ndarray]):
        self.measure, self.warmup = measure, options.warmup_steps
        self.is_auto = options.steps == "auto"
        self.most = options.max_steps if options.steps == "auto" else options.steps
        self.longest = max(1, self.most - round(FALL * self.most))
        self.best: list[float] = []
        self.since, self.flat = 0, None if self.is_auto else 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"best": self.best, "since": self.since, "flat": self.flat}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.best, self.since, self.flat = state["best"], state["since"], state["flat"]

    @property
    def end(self) -> int:
        """The last step, as far as is known."""
        if not self.is_auto or self.flat is None:
            return self.most
        return max(self.flat + 1, min(self.most, round(self.flat / (1 - FALL))))

    def share(self, step: int) -> float:
        """The learning rate of a step (counted from 0) as a share of the largest: it rises over the warm-up to 1, and falls
        along half a cosine that would reach 0 one step after the last."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.flat is None or step < self.flat:
            return 1.0
        first = max(self.warmup, self.flat)
        return (1 + math.cos(math.pi * (step - first) / max(1, self.end - first))) / 2

    def look(self, step: int) -> dict[str, float]:
        """After `step` steps: measure if that is due, and say what was found, for the log."""
        if self.flat is not None or not (step % EVAL_STEPS == 0 or step >= self.longest):
            return {}
        losses, best = self.measure(), np.asarray(self.best)
        saved = difference(losses, best) if self.best else None
        if saved is None or (saved.mean > LEAST_GAIN * best.mean() and (saved.n < 2 or saved.low > 0)):
            self.best, self.since = losses.tolist(), 0
        else:
            self.since += 1
        found = {"held_out": float(losses.mean())}
        if self.since >= PATIENCE or step >= self.longest:
            self.flat = step
            found["flat"] = step
        return found

    def ending(self) -> str:
        """The loss after the last step, where steps is auto, and what is wrong with it, in words."""
        last, best = self.measure(), np.asarray(self.best)
        said = f"held-out loss {last.mean():.3f}"
        if self.since < PATIENCE:
            return f"{said}, which still fell (tune.max_steps)"
        if last.mean() > best.mean() and (len(best) < 2 or difference(last, best).high < 0):
            return f"{said}, which was {best.mean():.3f} before: lower tune.learning_rate"
        return said
