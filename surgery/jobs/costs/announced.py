"""What a run says of its cost: a line as each stage starts, and a warning before the first where one does not fit."""

import random
from pathlib import Path

import torch

from surgery.jobs.costs.estimate import Costs
from surgery.jobs.costs.exporting import started
from surgery.jobs.costs.record import Stage
from surgery.loading.checkpoint import Checkpoint
from surgery.loading.hub import one_line
from surgery.records.recipe import Recipe
from surgery.runtime import memory
from surgery.runtime.processes import several_processes
from surgery.runtime.progress import busy, say, silently

SHORT = 60.0  # seconds: of a run that takes no longer, nothing is measured or said


class Announced:
    """The costs of a run that goes on in `out`, measured when its first stage starts; of what is finished by then, nothing is
    said. Several processes would each have to measure, so that they say nothing."""

    def __init__(self, recipe: Recipe, base: Checkpoint, out: Path, verify: str = "auto"):
        self.recipe, self.base, self.out, self.verify, self.start = recipe, base, out, verify, started()
        self._stages: dict[str, Stage] | None = None

    def say(self, name: str) -> None:
        """Say what a stage will cost, as far as it is known."""
        if several_processes():
            return
        if self._stages is None:
            self._stages = {}
            with busy("measuring a part of each stage"):
                advice = self._measure(name)
            for line in advice:
                say(f"warning: {line}")
        if name in self._stages:
            say(self._stages[name].line())

    def _measure(self, first: str) -> tuple[str, ...]:
        """The advice on the stages from the first on."""
        state = random.getstate()
        try:
            with silently(), torch.random.fork_rng():
                costs = Costs(self.recipe, self.base, self.start, quick=True, verify=self.verify)
                if costs.roughly() < SHORT:
                    return ()
                stages = costs.all_stages(first)
        except Exception as error:  # what goes wrong in a part goes wrong in the stage, which says what to do
            say(f"note: what follows could not be estimated ({one_line(error)})")
            return ()
        finally:
            random.setstate(state)
        self._stages = {stage.name: stage for stage in stages}
        return costs.advice(stages, memory.free_disk(self.out))
