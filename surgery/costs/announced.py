"""What a run says of its cost: a line as each stage starts, and a warning before the first where one does not fit."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from surgery.costs.estimate import BenchCosts, Costs, started
from surgery.costs.record import SLOWED, SURE, Stage
from surgery.jobs.observer import Observer
from surgery.loading.hub import one_line
from surgery.loading.opened import Checkpoint
from surgery.records.recipe import Recipe
from surgery.runtime import memory
from surgery.runtime.processes import several_processes
from surgery.runtime.progress import busy, duration, say, silently
from surgery.runtime.timing import slowed

T = TypeVar("T")
SHORT = 120.0  # seconds: of a run that takes no longer, by one forward, no step is timed and nothing is said
KNOWN = 1.15  # the factor, either way, for a stage of a kind that this run has done
LEAST = 2.0  # seconds of work, from which on it shows how busy the machine is


class Announced(Observer):
    """The costs of a run that goes on in `out`, estimated when its first stage starts; of what is finished by then, nothing is
    said. The work that a stage then took replaces the estimate for all of its kind, and how much longer it took than on an idle
    machine is what the next ones are expected to. Several processes would each have to measure, so
    that they say nothing."""

    def __init__(self, recipe: Recipe, base: Checkpoint, out: Path, verify: str):
        self.recipe, self.base, self.out, self.verify, self.start = recipe, base, out, verify, started()
        self.slowed = 1.0  # times as long as on an idle machine
        self.factors: dict[str, float] = {}  # by kind of stage: the work of one, over its estimate
        self._stages: dict[str, Stage] | None = None

    def starts(self, stage: str) -> None:
        """Say what a stage will cost, as far as it is known, and what is left of the run."""
        if stage in self._known_from(stage):
            left = self.time_after(stage) + self.slowed * self._known(stage).seconds
            spread = KNOWN if _kind(stage) in self.factors else SURE
            late = f" on this machine, which is busy ({self.slowed:.1f} times as long)" if self.slowed > SLOWED else ""
            say(f"{self._known(stage).line(self.slowed, spread)}; about {duration(left)} left in all{late}")

    def ended(self, stage: str, work: float, wall: float) -> None:
        if self._stages and stage in self._stages:
            self.factors[_kind(stage)] = work / max(1e-9, self._stages[stage].seconds)
            if work >= LEAST:
                self.slowed = slowed(work, wall)

    def work_after(self, stage: str) -> float:
        names = list(self._known_from(stage))
        after = names[names.index(stage) + 1 :] if stage in names else []
        return sum(self._known(each).seconds for each in after)

    def time_after(self, stage: str) -> float:
        return self.slowed * self.work_after(stage)

    def _known_from(self, first: str) -> dict[str, Stage]:
        """The stages, estimated when they are first asked for, from the first on that is not finished."""
        if self._stages is None and several_processes():
            return {}
        if self._stages is None:
            self._stages = {}
            with busy("estimating the costs"):
                advice = self._estimate(first)
            for line in advice:
                say(f"warning: {line}")
        return self._stages

    def _known(self, name: str) -> Stage:
        """A stage by what is known so far."""
        assert self._stages is not None
        stage, factor = self._stages[name], self.factors.get(_kind(name))
        return stage if factor is None else stage.model_copy(update={"seconds": factor * stage.seconds, "at_most": False})

    def _estimate(self, first: str) -> tuple[str, ...]:
        """The advice on the stages from the first on."""

        def estimated() -> tuple[str, ...]:
            costs = Costs(self.recipe, self.base, self.start, verify=self.verify)
            if costs.slowed * sum(stage.seconds for stage in costs.all_stages(first, timed=False)) < SHORT:
                return ()
            stages = costs.all_stages(first)
            self._stages, self.slowed = {stage.name: stage for stage in stages}, costs.slowed
            return costs.advice(stages, memory.free_disk(self.out))

        return _undisturbed(estimated) or ()


def announce(make: Callable[[], BenchCosts]) -> None:
    """Say what a comparison will cost, and whether it does not fit, unless it is short. Several processes say nothing."""
    if several_processes():
        return
    with busy("estimating the costs"):
        if (costs := _undisturbed(make)) is None:
            return
        stage = costs.bench()
    for line in costs.advice([stage], stage.disk):
        say(f"warning: {line}")
    if costs.slowed * stage.seconds >= SHORT:
        say(stage.line(costs.slowed))


def _undisturbed(work: Callable[[], T]) -> T | None:
    """Silent work that leaves all generators of random numbers as they were. None where it fails: what goes wrong in a part
    goes wrong in the stage, which says what to do."""
    state = random.getstate()
    try:
        with silently(), torch.random.fork_rng():
            return work()
    except Exception as error:
        problem = one_line(error)
    finally:
        random.setstate(state)
    say(f"note: what follows could not be estimated ({problem})")
    return None


def _kind(name: str) -> str:
    """Models that are tuned cost about the same."""
    return name.split(maxsplit=1)[0]
