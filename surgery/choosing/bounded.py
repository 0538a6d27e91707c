"""Plans within bounds: what a plan does to the probe, to text and to the base's other skills, untrained and after a few steps.

Whatever way proposes plans, no plan is taken that costs another skill of the base more than the bounds of
plan.auto allow, or may do so by its interval. What is lost untrained can come back in tuning, and what is kept untrained can be
lost. So the best plans within the bounds are tuned for a few steps, as the run will tune them, and judged once more.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.locating.ledger import Ledger, Tensors
from surgery.locating.skill_scores import TEXT
from surgery.locating.subject import Subject
from surgery.models.finite import within
from surgery.probes.encoded import Asked
from surgery.probes.perplexity import token_losses
from surgery.probes.question import Question
from surgery.probes.scoring import answer
from surgery.probes.skills import keeps, names_of, skill_questions, skills_of
from surgery.records.growth import Candidate, Growth, Round, Saved
from surgery.records.plan import Plan
from surgery.records.recipe import Auto, Data, Tune
from surgery.runtime import processes
from surgery.runtime.progress import counting, say
from surgery.splicing.splice import install
from surgery.statistics import LEVEL, at_chance, intervals, mean, proportion
from surgery.tuning.batches import held_out_windows
from surgery.tuning.loop import tune

SEED = 30_013  # added to the ranking's: no other questions have it (bench and early stopping add less)
TEXTS = 8  # windows of text in a forward
MORE = 4  # times as much text is measured where the first part leaves open whether a bound holds


class NoPlan(UserError):
    """No plan is worth its cache within the bounds. growth: what was measured."""

    def __init__(self, message: str, growth: Growth):
        super().__init__(message)
        self.growth = growth


@dataclass(frozen=True)
class PlanMeasurement:
    """A plan, or the base: of every question its loss and whether the answer was right, of every window of text its loss, and
    of every other skill whether its answers were right."""

    loss: np.ndarray
    correct: np.ndarray
    text: np.ndarray
    seconds: float
    skills: Mapping[str, np.ndarray] = field(default_factory=dict)

    def text_change(self, before: "PlanMeasurement") -> np.ndarray:
        """(windows,): of the windows that both have read; one may have read more."""
        both = min(len(before.text), len(self.text))
        return self.text[:both] - before.text[:both]


class Measuring:
    """Measures plans on the same questions and text. questions: see task.Task. text: (ids, real) of windows.
    skills: questions about each other skill. tuning: how a plan is tuned that is measured after a few steps. auto: its first
    windows of the text are measured, and the others where these leave open whether the loss stays within its bound; without
    it, all of the text."""

    def __init__(
        self, subject: Subject, questions: Sequence[Asked], text: tuple[Tensor, Tensor], batch_size: int = 32,
        kept: Path | None = None, *, skills: Mapping[str, Sequence[Question]] | None = None, tuning: Tune | None = None,
        data: Data | None = None, seed: int = 0, auto: Auto | None = None,
    ):  # fmt: skip
        self.subject, self.questions, self.text, self.batch_size = subject, list(questions), text, batch_size
        self.skills = {name: list(asked) for name, asked in (skills or {}).items()}
        self.tuning, self.data, self.seed = tuning or Tune(), data or Data(), seed
        self.windows = len(text[0]) if auto is None else auto.windows
        self.text_bound = None if auto is None else auto.text_bound
        conditions = subject.conditions.model_dump() if kept is not None else None
        asked = (self.questions, [part.tolist() for part in text], self.skills, self.windows, self.text_bound)
        self.ledger = Ledger(kept, "grow", conditions, hashlib.sha256(repr(asked).encode()).hexdigest(), batch_size)
        self.count = 0
        self.seconds = 0.0

    @classmethod
    def of(
        cls, subject: Subject, questions: Sequence[Asked], auto: Auto, *, data: Data, tuning: Tune, taught: str,
        batch_size: int, seed: int, kept: Path | None,
    ) -> "Measuring":  # fmt: skip
        """As plan.auto and the run's data say. taught: the probe that the plan is for."""
        skills = skills_of(data, {taught, *(lesson.probe for lesson in tuning.lessons)})
        asked = {
            name: skill_questions(skill, subject.tokenizer, data, auto.skill_examples, seed + SEED)
            for name, skill in zip(names_of(skills), skills, strict=True)
        }
        text = held_out_windows(subject.tokenizer, data, tuning, auto.windows * (MORE if asked else 1), seed + SEED)
        bounding = auto if asked else None
        return cls(subject, questions, text, batch_size, kept, skills=asked, tuning=tuning, data=data, seed=seed, auto=bounding)

    @cached_property
    def base(self) -> PlanMeasurement:
        """With all of the text."""
        return self.measure([None], "plan, the base")[0]

    def measure(self, plans: Sequence[Plan | None], description: str, steps: int = 0) -> list[PlanMeasurement]:
        """Of each plan, untrained or after so many steps; None stands for the base."""

        def key(number: int) -> Any:
            chosen = plans[number]
            if chosen is None:
                return None
            plan = chosen.model_dump(mode="json", exclude={"provenance", "growth", "at_risk"})
            if not steps:
                return plan
            return [plan, steps, self.seed, self.tuning.model_dump(mode="json"), self.data.model_dump(mode="json")]

        def tensors(number: int) -> Tensors:
            measured = self._measure(plans[number], steps) if steps else self._measure(plans[number])
            advance()
            arrays = {"loss": measured.loss, "correct": measured.correct, "text": measured.text, "seconds": measured.seconds}
            arrays |= {f"skill {name}": correct for name, correct in measured.skills.items()}
            return {name: torch.as_tensor(array) for name, array in arrays.items()}

        if self.text_bound is not None and any(plan is not None for plan in plans):
            _ = self.base  # which all processes measure together, and before what is compared with it
        # Tuning divides its batches among the processes, so that all of them take part in each.
        alone = steps and processes.state().num_processes > 1
        with counting(len(plans) if alone else len(processes.share(range(len(plans)))), description) as advance:
            if alone:
                gathered = {number: tensors(number) for number in range(len(plans))}
            else:
                gathered = self.ledger.gather(range(len(plans)), key, tensors)
        results = [
            PlanMeasurement(
                each["loss"].numpy(), each["correct"].numpy(), each["text"].numpy(), each["seconds"].item(),
                {name: each[f"skill {name}"].numpy() for name in self.skills},
            )
            for each in gathered.values()
        ]  # fmt: skip
        self.count += len(results)
        self.seconds += sum(result.seconds for result in results)
        return results

    def _measure(self, chosen: Plan | None, steps: int = 0) -> PlanMeasurement:
        start = time.monotonic()
        model = self.subject.model if chosen is None else install(self.subject.model, chosen).eval()
        with within("the base" if chosen is None else repr(chosen)):
            if steps:
                self._tune(model, steps)
            answers = answer(model, self.subject.tokenizer, self.questions, self.batch_size)
            text = self._text(model, slice(None if chosen is None else self.windows))
            if chosen is not None and self._open(text):
                text = np.concatenate([text, self._text(model, slice(len(text), None))])
            skills = {
                name: answer(model, self.subject.tokenizer, asked, self.batch_size).correct
                for name, asked in self.skills.items()
            }
        return PlanMeasurement(answers.loss, answers.correct, text, time.monotonic() - start, skills)

    def _text(self, model: PreTrainedModel, windows: slice) -> np.ndarray:
        """(windows,): the mean loss of each."""
        losses = []
        for ids, real in zip(*(side[windows].to(model.device).split(TEXTS) for side in self.text), strict=True):
            wanted = real[:, 1:]
            sums = (token_losses(model, ids) * wanted).sum(1)
            losses.append((sums / wanted.sum(1).clamp_min(1)).double().cpu())
        return torch.cat(losses).numpy()

    def _open(self, text: np.ndarray) -> bool:
        """Whether the loss stays within its bound by its value, and not by its interval."""
        if self.text_bound is None:
            return False
        risen = mean(text - self.base.text[: len(text)])
        return risen.value <= self.text_bound < risen.ci95[1]

    def _tune(self, model: PreTrainedModel, steps: int) -> None:
        """As the run will, for a few steps."""
        warmup = min(self.tuning.warmup_steps, steps // 2)
        few = {"steps": steps, "decay": 1.0, "warmup_steps": warmup, "early_stopping": None, "report_to": ()}
        options = self.tuning.model_copy(update=few)
        names = ", ".join(f"L{graft['layer']}" for graft in model.config.grafts)
        tune(model, self.subject.tokenizer, options, data=self.data, seed=self.seed, description=f"a trial, {names}",
             teacher=self.subject.model)  # fmt: skip
        model.eval()


class Bounds:
    """What a plan must not cost, given what was measured of the base. Skills that the base does not have are left out, and text
    that it predicts no better than if it took all tokens to be equally likely. Text is bounded wherever skills were asked for,
    also of a base that has none of them."""

    def __init__(self, measuring: Measuring, base: PlanMeasurement, auto: Auto):
        self.base, self.auto, self.bounding = base, auto, bool(measuring.skills)
        self.skills: list[str] = []
        for name, asked in measuring.skills.items():
            accuracy, chance = proportion(base.skills[name]), float(np.mean([question.chance for question in asked]))
            if at_chance(accuracy, chance):
                say(f"plan: the base is at chance on {name} ({accuracy}, chance {chance:.3f}), so it sets no bound")
            else:
                self.skills.append(name)
        loss, guessing = float(base.text.mean()), math.log(measuring.subject.model.config.vocab_size)
        self.reads = loss < guessing
        if self.bounding and not self.reads:
            told = f"{loss:.2f} nats a token, guessing {guessing:.2f}"
            say(f"plan: the base predicts text no better than guessing ({told}), so text sets no bound")

    def beyond(self, measured: PlanMeasurement) -> tuple[str, ...]:
        """The skills that a plan costs more than the bounds, or may do so by its interval; and "text"."""
        bound = self.auto.accuracy_bound
        lost = [name for name in self.skills if not keeps(self.base.skills[name], measured.skills[name], bound)]
        return (*lost, *([TEXT] if self.bounding and self.costs_text(measured, self.base) else []))

    def costs_text(self, measured: PlanMeasurement, before: PlanMeasurement) -> bool:
        """Whether the loss rises more than the bound allows, or may do so by its interval."""
        return self.reads and mean(measured.text_change(before)).ci95[1] > self.auto.text_bound

    def accuracies(self, measured: PlanMeasurement) -> dict[str, float]:
        """Of the skills that the base has."""
        return {name: float(measured.skills[name].mean()) for name in self.skills}

    def candidate(self, plan: Plan, measured: PlanMeasurement, steps: int = 0) -> Candidate:
        """A plan's record."""
        return Candidate(
            sites=plan.sites, blend=plan.blend, steps=steps, saved=saved(self.base, measured, self.auto.text_weight),
            **self.figures(measured),
        )  # fmt: skip

    def figures(self, measured: PlanMeasurement) -> dict[str, Any]:
        """What the records of all plans say alike."""
        return {
            "accuracy": float(measured.correct.mean()), "loss": float(measured.loss.mean()),
            "text_loss": float(measured.text_change(self.base).mean()), "skills": self.accuracies(measured),
            "beyond": self.beyond(measured),
        }  # fmt: skip


def saved(before: PlanMeasurement, after: PlanMeasurement, text_weight: float, level: float = LEVEL) -> Saved:
    """The two parts are of different examples, so that the squares of their margins add up."""
    parts = [(before.loss - after.loss, 1.0), (-after.text_change(before), text_weight)]
    value, low, high = 0.0, 0.0, 0.0
    for values, weight in parts:
        (centre,), (least,), (most,), _ = intervals(values[:, None], level=level)
        value += weight * centre
        low += (weight * (centre - least)) ** 2
        high += (weight * (most - centre)) ** 2
    return Saved(value=float(value), ci95=(float(value - low**0.5), float(value + high**0.5)))


def decided(
    measuring: Measuring, bounds: Bounds, plans: Sequence[Plan], growth: Growth, *, by_preference: bool = False
) -> Plan:  # fmt: skip
    """The best of some plans within the bounds, untrained and after a few steps, with how it was found. Raises NoPlan, which
    shows the frontier, where none is within them.

    plans: those that are proposed, the preferred ones first. growth: what is known of how they came about. by_preference: the
    first of them within the bounds are tuned, not those that save most untrained."""
    auto = bounds.auto
    if not bounds.bounding:  # data.skills is empty
        return plans[0].model_copy(update={"growth": growth})
    measured = measuring.measure(plans, "plan, candidates")
    untrained = [bounds.candidate(*each) for each in zip(plans, measured, strict=True)]
    candidates = [*untrained]

    def ended() -> Growth:
        return growth.model_copy(
            update={
                "candidates": tuple(candidates), "skills": bounds.accuracies(bounds.base), "measured": measuring.count,
                "seconds": round(measuring.seconds, 2),
            }
        )  # fmt: skip

    allowed = [i for i, each in enumerate(untrained) if not each.beyond]
    if not allowed:
        raise refused(ended(), auto)
    finalists = (allowed if by_preference else sorted(allowed, key=lambda i: -untrained[i].saved.value))[: auto.finalists]
    if not auto.steps:
        return plans[finalists[0]].model_copy(update={"growth": ended()})
    tuned = measuring.measure([plans[i] for i in finalists], f"plan, after {auto.steps} steps", auto.steps)
    after = [bounds.candidate(plans[i], each, auto.steps) for i, each in zip(finalists, tuned, strict=True)]
    candidates += after
    for each in after:
        say(f"plan: {each}" + (f" (beyond the bounds: {', '.join(each.beyond)})" if each.beyond else ""))
    kept = [number for number, each in enumerate(after) if not each.beyond]
    if not kept:
        raise refused(ended(), auto)
    best = max(kept, key=lambda number: after[number].saved.value)

    def heads(number: int) -> int:
        return sum(len(site.heads) for site in after[number].sites)

    def as_good(number: int) -> bool:
        """Whether what the best saves beyond it is not worth the cache of more heads."""
        more = saved(tuned[number], tuned[best], auto.text_weight)
        return more.ci95[0] <= 0 or more.value < auto.least_gain

    fewer = [number for number in kept if heads(number) < heads(best) and as_good(number)]
    chosen = min(fewer, key=lambda number: (heads(number), -after[number].saved.value), default=best)
    return plans[finalists[chosen]].model_copy(update={"growth": ended()})


def refused(growth: Growth, auto: Auto) -> NoPlan:
    """Says what a gain costs, a line for each candidate of the frontier, and returns that no plan keeps the bounds."""
    skills = "".join(f", {name} {accuracy:.3f}" for name, accuracy in growth.skills.items())
    say(f"what a gain costs; the base: accuracy {growth.accuracy:.3f}{skills}")
    for candidate in growth.frontier():
        say(f"  {candidate} (beyond the bounds: {', '.join(candidate.beyond)})")
    return NoPlan(
        f"no plan keeps what the base can do: each of the {len(growth.candidates)} that were measured costs another skill more "
        f"than {auto.accuracy_bound:g} (plan.auto.accuracy_bound), or text more than {auto.text_bound:g} nats "
        "(plan.auto.text_bound), or may do so by its 95% interval; ask more questions (plan.auto.skill_examples), measure more "
        "text (plan.auto.windows), widen a bound, take skills out of data.skills, or set plan.sites",
        growth,
    )


def growth_of(probe: Mapping[str, Any], measuring: Measuring, base: PlanMeasurement, rounds: Sequence[Round] = ()) -> Growth:
    """The record of a search on questions of a probe."""
    return Growth(
        probe={**probe, "examples": len(measuring.questions), "windows": measuring.windows},
        accuracy=float(base.correct.mean()), loss=float(base.loss.mean()), rounds=tuple(rounds), measured=measuring.count,
        seconds=round(measuring.seconds, 2),
    )  # fmt: skip
