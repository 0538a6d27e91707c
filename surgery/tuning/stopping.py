"""The learning rate, and tune.steps=auto: when the loss on examples that are kept back is flat, when the steps then end, and
which weights are taken: the last, or the best where the loss rose after them.

The loss falls once more while the learning rate does, so a curve under a rate that already falls says nothing on whether more
steps would help. So the rate stays until the curve is flat, and falls after that. A curve of means goes up and down by chance;
a measurement counts as progress only where its difference to the best before is beyond one standard error, over batches, and
worth the steps. Two standard errors would be too strict: with few batches, a curve that falls by a tenth each time would be
called flat.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surgery.records.recipe import Tune

EVAL_STEPS = 25  # the loss is measured after every so many steps
EXAMPLES = 128  # sequences of each measurement
LEAST_GAIN = 0.02  # progress is a loss below the best so far by this share of it
PATIENCE = 2  # measurements without progress, after which the curve is flat
LEAST_LOSS = 0.01  # nats by which the loss has to rise besides, before the best weights come back: near 0 a share is nothing
FALL = 0.25  # the share of all steps over which the learning rate falls, where steps is auto


class Watcher:
    """Says the learning rate of a step, and whether it was the last.

    measure: gives the losses on examples that are kept back, (batches,) in nats; it is called where steps is auto. trained:
    what learns. flat: the step after which the learning rate falls; None before that is known. back_to: the step whose weights
    were put back in the end, if they were.
    """

    def __init__(self, options: Tune, measure: Callable[[], np.ndarray], trained: dict[str, nn.Parameter]):
        self.measure, self.trained, self.warmup = measure, trained, options.warmup_steps
        self.is_auto = options.steps == "auto"
        self.most = options.max_steps if options.steps == "auto" else options.steps
        self.longest = max(1, self.most - round(FALL * self.most))
        self.best: list[float] = []
        self.best_weights: dict[str, Tensor] = {}
        self.best_step, self.since, self.flat = 0, 0, None if self.is_auto else 0
        self.back_to: int | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, beside the best weights."""
        return {key: getattr(self, key) for key in ("best", "best_step", "since", "flat")}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        for key in self.state():
            setattr(self, key, state[key])

    @property
    def end(self) -> int:
        """The last step, as far as is known."""
        if not self.is_auto or self.flat is None:
            return self.most
        return min(self.most, max(self.flat + 1, round(self.flat / (1 - FALL))))

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
        losses = self.measure()
        saved = np.asarray(self.best) - losses if self.best else losses
        error = saved.std(ddof=1) / len(saved) ** 0.5 if len(saved) > 1 else 0.0
        if not self.best or saved.mean() > max(LEAST_GAIN * np.mean(self.best), error):
            self.best, self.best_step, self.since = losses.tolist(), step, 0
            self.best_weights = {key: p.detach().to("cpu", copy=True).contiguous() for key, p in self.trained.items()}
        else:
            self.since += 1
        found = {"held_out": float(losses.mean())}
        if self.since >= PATIENCE or step >= self.longest:
            self.flat = step
            found["flat"] = step
        return found

    @torch.no_grad()
    def ending(self) -> str:
        """After the last step, where steps is auto: put the best weights back if the loss is larger now by LEAST_GAIN of it
        and LEAST_LOSS, and say what it is."""
        last, best = self.measure(), np.asarray(self.best)
        said = f"held-out loss {last.mean():.3f}"
        if last.mean() > (1 + LEAST_GAIN) * best.mean() + LEAST_LOSS:
            self.back_to = self.best_step
            for key, p in self.trained.items():
                p.copy_(self.best_weights[key])
            return f"{said}: back to step {self.best_step}, where it was {best.mean():.3f}; lower tune.learning_rate"
        return f"{said}, which still fell (tune.max_steps)" if self.since < PATIENCE else said
