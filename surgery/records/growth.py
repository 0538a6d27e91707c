"""How a plan that measuring has found came about (`plan.heads: auto`, `plan.by: choice`), and what that cost."""

from typing import Any

from surgery.records.record import Record
from surgery.records.site import SitesText, SiteText, shortened


class Saved(Record):
    """The nats that something saves, on the same questions and windows of text, with its paired 95% interval: loss on
    questions, and `plan.auto.text_weight` times loss on text."""

    value: float
    ci95: tuple[float, float]


class Trial(Record):
    """A measured plan, compared with the plan before the round. site: the head that it adds, of Mamba-1 a block of
    channels. blend: its gate; None where attention replaces the SSM. accuracy: of the answers; loss: on questions, in nats;
    text_loss: by how much its loss on text is above the base's, in nats per token. skills: its accuracy on each other skill.
    beyond: the skills (or "text") that it costs more than the bounds allow."""

    site: SiteText
    blend: float | None
    saved: Saved
    accuracy: float
    loss: float
    text_loss: float
    skills: dict[str, float] = {}
    beyond: tuple[str, ...] = ()


class Round(Record):
    """trials: every one of the round, in order. best: the number of the one that saves most within the bounds. added: whether
    that is worth its cache."""

    trials: tuple[Trial, ...]
    best: int
    added: bool


class Candidate(Record):
    """A whole plan, compared with the base, after `steps` steps of tuning (0: untrained). The rest as in Trial."""

    sites: SitesText
    blend: float | None
    steps: int
    saved: Saved
    accuracy: float
    loss: float
    text_loss: float
    skills: dict[str, float] = {}
    beyond: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its heads and their gate."""
        return f"{shortened(self.sites)}, {'no gate' if self.blend is None else f'gate {self.blend:g}'}"

    def __str__(self) -> str:
        skills = "".join(f", {name} {accuracy:.3f}" for name, accuracy in self.skills.items())
        tuned = f" after {self.steps} steps" if self.steps else " untrained"
        return f"{self.label}{tuned}: accuracy {self.accuracy:.3f}{skills}, text {self.text_loss:+.4f} nats"


class Growth(Record):
    """probe: what was asked (name, options, examples, and the windows of text). accuracy, loss: the base's; skills: its
    accuracy on each other skill that it has. candidates: whole plans that were measured, untrained, then after a few steps.
    measured: how many plans. seconds: how long that took, without what an earlier run had measured."""

    probe: dict[str, Any]
    accuracy: float
    loss: float
    rounds: tuple[Round, ...]
    skills: dict[str, float] = {}
    candidates: tuple[Candidate, ...] = ()
    measured: int
    seconds: float

    def heads(self) -> list[str]:
        """What was added, in order."""
        return [str(each.trials[each.best].site) for each in self.rounds if each.added]

    def frontier(self) -> list[Candidate]:
        """Of the candidates those which no other one beats both in accuracy and in what it costs (cost); the dearest last."""
        best: list[Candidate] = []
        for candidate in sorted(self.candidates, key=lambda each: (self.cost(each), -each.accuracy)):
            if not best or candidate.accuracy > best[-1].accuracy:
                best.append(candidate)
        return best

    def cost(self, candidate: Candidate) -> float:
        """The accuracy that a candidate loses on the skill that it costs most; 0 where it loses none."""
        return max((self.skills[name] - accuracy for name, accuracy in candidate.skills.items()), default=0.0)
