"""plan.heads: auto. A plan that grows head by head, by what is measured, and stops where the next is not worth its cache.

Each round puts candidates, the leading heads of the ranking, one after the other beside those that are in the plan, untrained,
and measures the hybrid on questions that no head was ranked by and on held-out text. What counts is what tuning will minimise:
the loss on both. Heads that serve the text as well want a small gate, so that gates are tried, too: in the first round for the
leading head, in every round for the best one. Heads under one gate share the work, and two need a smaller one than one does: so
candidates are tried under the gate of the plan and under the next smaller one.

The best of many trials looks better than it is. So the interval that has to leave out 0 is corrected for the number of trials
of the round (Bonferroni).
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.loading.opened import Checkpoint
from surgery.locating.ledger import Ledger, Tensors
from surgery.locating.planning import plan
from surgery.locating.questions import asked
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.models.finite import within
from surgery.probes.encoded import Asked
from surgery.probes.perplexity import token_losses
from surgery.probes.scoring import answer
from surgery.records.growth import Growth, Round, Saved, Trial
from surgery.records.plan import Plan
from surgery.records.recipe import Auto, Data, PlanOptions, Tune
from surgery.records.site import Site
from surgery.runtime import processes
from surgery.runtime.progress import counting, say
from surgery.splicing.splice import install
from surgery.statistics import LEVEL, intervals
from surgery.tuning.batches import held_out_windows

SEED = 30_013  # added to the ranking's: no other questions have it (bench, calibrate and early stopping add less)
TEXTS = 8  # windows of text in a forward


@dataclass(frozen=True)
class Measured:
    """A plan, or the base: of every question its loss and whether the answer was right, of every window of text its loss."""

    loss: np.ndarray
    correct: np.ndarray
    text: np.ndarray
    seconds: float


def grow(
    base: PreTrainedModel | Checkpoint, ranking: Ranking, options: PlanOptions | None = None, *,
    tokenizer: PreTrainedTokenizerBase | None = None, data: Data | None = None, text_tokens: int | None = None,
    batch_size: int = 32, seed: int | None = None, kept: Path | None = None,
) -> Plan:  # fmt: skip
    """The plan that heads are added to until the next one is not worth its cache (`plan.auto`). plan.growth says what each
    round measured.

    base: what was ranked; a Checkpoint, or a model with its tokenizer. data: whose training text the windows are held out from.
    text_tokens: of a window, by default tune's. batch_size: questions in a forward. seed: the ranking's, unless given. kept: a
    folder for what is measured; what is there already is not measured again. Several processes share the plans of a round.

    Raises UserError for a ranking of a model that cannot be spliced, and where no head is worth its cache.
    """
    options = options or PlanOptions(heads="auto")
    subject = Subject.of(base, tokenizer, verb="grow")
    seed = ranking.provenance.seed if seed is None else seed
    leading = plan(ranking, min(len(ranking.heads), options.auto.max_heads + options.auto.candidates - 1)).sites
    heads = {part for site in leading for part in site.each()}
    order = [site for site in (ranking.columns.site(i) for i in range(len(ranking.heads))) if site in heads]
    questions = fresh_questions(subject.tokenizer, ranking, options.auto.examples, seed)
    tokens = Tune().text_tokens if text_tokens is None else text_tokens
    text = held_out_windows(subject.tokenizer, data or Data(), Tune(text_tokens=tokens), options.auto.windows, seed + SEED)
    measuring = Measuring(subject, questions, text, batch_size, kept)
    return _Growing(measuring, ranking, options, order, seed).grown()


def fresh_questions(tokenizer: PreTrainedTokenizerBase, ranking: Ranking, n: int, seed: int) -> list[Asked]:
    """At most n questions of a ranking's probe that no head was ranked by. Raises UserError for fewer than two."""
    _, questions = asked(tokenizer, ranking.probe["name"], ranking.probe["options"])
    known = {*questions(ranking.probe["examples"], ranking.probe["seed"])}
    fresh = [question for question in questions(n + len(known), seed + SEED) if question not in known][:n]
    if len(fresh) < 2:
        raise UserError(
            f"plan.heads=auto needs questions that no head was ranked by, and {ranking.probe['name']} has {len(fresh)} of "
            "them; lower locate.examples, or set plan.heads to a number"
        )
    return fresh


class Measuring:
    """Measures plans on the same questions and text. questions: see fresh_questions. text: (ids, real) of windows."""

    def __init__(
        self, subject: Subject, questions: Sequence[Asked], text: tuple[Tensor, Tensor], batch_size: int = 32,
        kept: Path | None = None,
    ):  # fmt: skip
        self.subject, self.questions, self.text, self.batch_size = subject, list(questions), text, batch_size
        conditions = subject.conditions.model_dump() if kept is not None else None
        seen = hashlib.sha256(repr((self.questions, [part.tolist() for part in text])).encode()).hexdigest()
        self.ledger = Ledger(kept, "grow", conditions, seen, batch_size)
        self.count = 0
        self.seconds = 0.0

    def measure(self, plans: Sequence[Plan | None], description: str) -> list[Measured]:
        """Of each plan; None stands for the base."""

        def key(number: int) -> Any:
            chosen = plans[number]
            return None if chosen is None else chosen.model_dump(mode="json", exclude={"provenance", "growth"})

        def tensors(number: int) -> Tensors:
            measured = self._measure(plans[number])
            advance()
            arrays = {"loss": measured.loss, "correct": measured.correct, "text": measured.text, "seconds": measured.seconds}
            return {name: torch.as_tensor(array) for name, array in arrays.items()}

        with counting(len(processes.share(range(len(plans)))), description) as advance:
            gathered = self.ledger.gather(range(len(plans)), key, tensors)
        results = [
            Measured(each["loss"].numpy(), each["correct"].numpy(), each["text"].numpy(), each["seconds"].item())
            for each in gathered.values()
        ]
        self.count += len(results)
        self.seconds += sum(result.seconds for result in results)
        return results

    def _measure(self, chosen: Plan | None) -> Measured:
        start = time.monotonic()
        model = self.subject.model if chosen is None else install(self.subject.model, chosen).eval()
        with within("the base" if chosen is None else f"attention at {', '.join(map(str, chosen.sites))}"):
            answers = answer(model, self.subject.tokenizer, self.questions, self.batch_size)
            losses = []
            for ids, real in zip(*(side.to(model.device).split(TEXTS) for side in self.text), strict=True):
                wanted = real[:, 1:]
                sums = (token_losses(model, ids) * wanted).sum(1)
                losses.append((sums / wanted.sum(1).clamp_min(1)).double().cpu())
        return Measured(answers.loss, answers.correct, torch.cat(losses).numpy(), time.monotonic() - start)


class _Growing:
    """The rounds. order: heads, the leading ones first."""

    def __init__(self, measuring: Measuring, ranking: Ranking, options: PlanOptions, order: list[Site], seed: int):
        self.measuring, self.ranking, self.options, self.order, self.seed = measuring, ranking, options, order, seed
        self.auto: Auto = options.auto
        copies = options.init == "copy"  # which keep a gate of 1
        gates = [each if copies else gate(each) for each in self.auto.gates]
        self.gates: list[float | None] = [options.blend] if options.blend is not None else [*gates]
        self.rounds: list[Round] = []

    def grown(self) -> Plan:
        (base,) = self.measuring.measure([None], "plan, the base")
        sites: list[Site] = []
        before, blend = base, None
        while len(sites) < self.auto.max_heads:
            candidates = [site for site in self.order if site not in sites][: self.auto.candidates]
            if not candidates:
                break
            tried = self._round(sites, candidates, blend, before)
            trials = [self._trial(*key, measured, before, base) for key, measured in tried.items()]
            best = max(range(len(trials)), key=lambda i: trials[i].saved.value)
            (site, gate_of), measured = [*tried.items()][best]
            least = self._saved(before, measured, LEVEL / len(trials)).ci95[0]
            added = least > 0 and trials[best].saved.value >= self.auto.least_gain
            self.rounds.append(Round(trials=tuple(trials), best=best, added=added))
            say(_line(self.rounds, len(sites)))
            if not added:
                break
            sites, before, blend = [*sites, site], measured, gate_of
        if not sites:
            raise UserError(
                f"no head is worth its cache: of the {len(self.order)} leading ones none saves {self.auto.least_gain} nats "
                f"(the best, {_best(self.rounds[-1])}); locate with another probe, lower plan.auto.least_gain, or set "
                "plan.heads to a number"
            )
        growth = Growth(
            probe=self.ranking.probe | {"examples": len(self.measuring.questions), "windows": len(self.measuring.text[0])},
            accuracy=float(base.correct.mean()), loss=float(base.loss.mean()), rounds=tuple(self.rounds),
            measured=self.measuring.count, seconds=round(self.measuring.seconds, 2),
        )  # fmt: skip
        return self._plan(sites, blend).model_copy(update={"growth": growth})

    def _round(
        self, sites: list[Site], candidates: list[Site], blend: float | None, before: Measured
    ) -> dict[tuple[Site, float | None], Measured]:
        """What is tried: by head and gate."""
        tried: dict[tuple[Site, float | None], Measured] = {}

        def attempt(keys: list[tuple[Site, float | None]]) -> None:
            fresh = [key for key in keys if key not in tried]
            plans = [self._plan([*sites, site], blend) for site, blend in fresh]
            if plans:
                tried.update(zip(fresh, self.measuring.measure(plans, f"plan, head {len(sites) + 1}"), strict=True))

        def best() -> tuple[Site, float | None]:
            return max(tried, key=lambda key: self._saved(before, tried[key]).value)

        if not sites:
            attempt([(candidates[0], gate) for gate in self.gates])
            blend = best()[1]
        attempt([(site, gate) for gate in self._near(blend) for site in candidates])
        attempt([(best()[0], gate) for gate in self.gates])
        return tried

    def _near(self, blend: float | None) -> list[float | None]:
        """The gate, and the next smaller one."""
        order = sorted(self.gates, key=lambda gate: -(1 if gate is None else gate))
        return order[order.index(blend) :][:2]

    def _plan(self, sites: list[Site], blend: float | None) -> Plan:
        given = self.options.given() | {"heads": 1, "sites": tuple(sites), "blend": blend}
        return plan(self.ranking, **given, seed=self.seed)

    def _saved(self, before: Measured, after: Measured, level: float = LEVEL) -> Saved:
        """The two parts are of different examples, so that the squares of their margins add up."""
        parts = [(before.loss - after.loss, 1.0), (before.text - after.text, self.auto.text_weight)]
        value, low, high = 0.0, 0.0, 0.0
        for values, weight in parts:
            (centre,), (least,), (most,), _ = intervals(values[:, None], level=level)
            value += weight * centre
            low += (weight * (centre - least)) ** 2
            high += (weight * (most - centre)) ** 2
        return Saved(value=float(value), ci95=(float(value - low**0.5), float(value + high**0.5)))

    def _trial(self, site: Site, blend: float | None, after: Measured, before: Measured, base: Measured) -> Trial:
        return Trial(
            site=site, blend=blend, saved=self._saved(before, after), accuracy=float(after.correct.mean()),
            loss=float(after.loss.mean()), text_loss=float((after.text - base.text).mean()),
        )  # fmt: skip


def gate(value: float) -> float | None:
    """As a plan has it: a gate of 1 is none."""
    return None if value == 1 else value


def most_plans(options: Auto, gates: int, heads: int) -> int:
    """How many plans are measured at most, the base included, in a model of so many heads."""
    rounds, candidates = min(options.max_heads, heads), min(options.candidates, heads)
    return 1 + gates + rounds * min(candidates * gates, candidates * min(2, gates) + gates)


def _line(rounds: list[Round], count: int) -> str:
    """What a round found, in words."""
    last = rounds[-1]
    if last.added:
        return f"plan: head {count + 1}, {_best(last)}"
    return f"plan: another head is not worth its cache (the best, {_best(last)})"


def _best(last: Round) -> str:
    trial = last.trials[last.best]
    how = "" if trial.blend is None else f" under a gate of {trial.blend:g}"
    low, high = trial.saved.ci95
    return f"{trial.site}{how}, saves {trial.saved.value:+.3f} nats [{low:+.3f}, {high:+.3f}]: accuracy {trial.accuracy:.3f}"
