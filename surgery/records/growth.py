"""How a plan with `plan.heads: auto` came about: what each round measured, and what that cost."""

from typing import Any

from surgery.records.record import Record
from surgery.records.site import SiteText


class Saved(Record):
    """The nats that something saves, on the same questions and windows of text, with its paired 95% interval: loss on
    questions, and `plan.auto.text_weight` times loss on text."""

    value: float
    ci95: tuple[float, float]


class Trial(Record):
    """A plan that was measured, against the plan before the round. site: the head that it adds. blend: its gate; None where
    attention replaces the SSM. accuracy: of the answers; loss: on questions, in nats; text_loss: by how much its loss on text
    is above the base's, in nats per token."""

    site: SiteText
    blend: float | None
    saved: Saved
    accuracy: float
    loss: float
    text_loss: float


class Round(Record):
    """trials: every one of the round, in order. best: the number of the one that saves most. added: whether that is worth its
    cache."""

    trials: tuple[Trial, ...]
    best: int
    added: bool


class Growth(Record):
    """probe: what was asked (name, options, examples, and the windows of text). accuracy, loss: the base's. measured: how many
    plans. seconds: that this took, where nothing was known from an earlier run."""

    probe: dict[str, Any]
    accuracy: float
    loss: float
    rounds: tuple[Round, ...]
    measured: int
    seconds: float

    def heads(self) -> list[str]:
        """What was added, in order."""
        return [str(each.trials[each.best].site) for each in self.rounds if each.added]
