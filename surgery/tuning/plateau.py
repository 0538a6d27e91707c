"""tune.steps: auto. Says when the curve of the held-out loss is flat, and when the steps then end.

The loss falls once more while the learning rate does, so that a curve under a learning rate that already falls says nothing on
whether more steps would help. So the rate stays until the curve is flat, and falls after that.

A curve of means goes up and down by chance. So a measurement counts as progress only where the interval of its difference to
the best before, batch by batch, leaves out 0, and where the difference is worth the steps.
"""

from dataclasses import dataclass, field

import numpy as np

from surgery.records.recipe import Tune
from surgery.statistics import mean

EVAL_STEPS = 25  # the loss is measured after every so many steps
EXAMPLES = 128  # sequences of lessons for each measurement, and as many batches of text as that makes
LEAST_GAIN = 0.02  # progress is a loss below the best so far by this share of it
PATIENCE = 2  # measurements without progress, after which the curve is flat
DECAY = 0.25  # of all steps, unless tune.decay says otherwise


@dataclass
class LossCurve:
    """What is known so far, as JSON values for a checkpoint. best: the losses of the best measurement, batch by batch. since:
    measurements without progress after it. flat: the step after which the learning rate falls; None before."""

    best: list[float] = field(default_factory=list)
    since: int = 0
    flat: int | None = None


class Plateau:
    """Decides for one run."""

    def __init__(self, options: Tune, curve: LossCurve):
        self.options, self.curve = options, curve
        self.decay = options.decay if options.decay < 1 else DECAY
        self.longest = max(1, options.most_steps - round(self.decay * options.most_steps))

    def is_due(self, step: int) -> bool:
        """Whether the loss is to be measured after this step."""
        return self.curve.flat is None and (step % EVAL_STEPS == 0 or step >= self.longest)

    def look(self, step: int, losses: np.ndarray) -> None:
        """Take in a measurement, (batches,) in nats."""
        best = np.asarray(self.curve.best)
        if not len(best) or self._progress(best, losses):
            self.curve.best, self.curve.since = losses.tolist(), 0
        else:
            self.curve.since += 1
        if self.curve.since >= PATIENCE or step >= self.longest:
            self.curve.flat = step

    def is_cut_short(self) -> bool:
        """Whether the learning rate falls because the steps end, and not because the curve is flat."""
        return self.curve.flat is not None and self.curve.since < PATIENCE

    def _progress(self, best: np.ndarray, losses: np.ndarray) -> bool:
        saved = mean(best - losses)
        return saved.value > LEAST_GAIN * best.mean() and (saved.n < 2 or saved.ci95[0] > 0)

    def span(self) -> tuple[int, int] | None:
        """The step from which the learning rate falls, and the last step; None while that is not known."""
        if self.curve.flat is None:
            return None
        steps = round(self.curve.flat / (1 - self.decay)) if self.decay < 1 else self.options.most_steps
        return self.curve.flat, max(self.curve.flat + 1, min(self.options.most_steps, steps))


def taken(options: Tune, log: list[dict]) -> Tune:
    """The options by which another model is tuned for as many steps as one whose log this is, with the same learning rates."""
    steps = len(log)
    flat = next((int(record["flat"]) for record in log if "flat" in record), steps)
    if options.steps != "auto" or not steps:
        return options
    return options.model_copy(update={"steps": steps, "decay": max(1, steps - flat) / steps})
