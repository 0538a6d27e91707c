"""Who is told of the stages of a run, and says how much work is left."""

from pathlib import Path

from surgery.loading.opened import Checkpoint
from surgery.records.recipe import Recipe


class Observer:
    """Of a run of this recipe with this base, into the folder `out`, whose export is verified this way. This one says nothing,
    and knows of no work that is left; surgery.costs has one that does."""

    def __init__(self, recipe: Recipe, base: Checkpoint, out: Path, verify: str):
        pass

    def starts(self, stage: str) -> None:
        """A stage is about to start."""

    def ended(self, stage: str, work: float, wall: float) -> None:
        """What a stage took, in seconds of work and on the wall."""

    def work_after(self, stage: str) -> float:
        """The seconds of what comes after a stage, on an idle machine; 0 where that is little, or not known."""
        return 0.0

    def time_after(self, stage: str) -> float:
        """The same on this machine, as busy as it is."""
        return 0.0
