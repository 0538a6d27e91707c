"""What suites are made of: tasks, which each give one number an example."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedModel

from surgery.evaluation.cells import digest
from surgery.evaluation.results import is_loss

Shapes = list[tuple[int, int]]  # (rows, tokens) of every forward that a model makes


@dataclass(frozen=True)
class Outcome:
    """values: one an example; digests: one an example, of what was asked; inputs: of what entered the model."""

    values: np.ndarray
    digests: tuple[str, ...]
    inputs: str


@dataclass(frozen=True)
class Task:
    """One cell for every model. identity: all that the outcome depends on beside the model and the Conditions. part: which task
    of a group of the harness, as the examples of all are the group's. harness: the version of lm_eval, if that asks. count: how
    many examples it has; there: how many there are, if the settings may leave some out. shapes: of its forwards; None where the
    harness makes them. lacking: what to say of it where it has no examples, and cannot do without."""

    name: str
    seed: int
    identity: str
    measure: Callable[[PreTrainedModel], Outcome]
    part: str = ""
    harness: str | None = None
    count: int = 0
    there: int = 0
    shapes: Callable[[], Shapes] | None = None
    lacking: str = ""

    def key(self) -> dict[str, Any]:
        """What the outcome depends on, for its cell."""
        return {"task": self.name, "part": self.part, "questions": digest(self.identity), "lm_eval": self.harness}

    @property
    def metric(self) -> Literal["accuracy", "loss"]:
        return "loss" if is_loss(self.name) else "accuracy"


@dataclass(frozen=True)
class TaskFamily:
    """How reports show the tasks of one probe in several sizes (kv.4, kv.8, ...): the title of their figure, what a size
    counts, and the label of its axis. guess: the accuracy of a guess, where no probe of that name says it. picture: the file
    that holds the figures of several such families, and what it shows."""

    title: str
    unit: str
    axis: str
    guess: float | None = None
    picture: tuple[str, str] | None = None


def bench_seed(seed: int) -> int:
    """Other examples than those that locate ranked heads with."""
    return seed + 10_000
