"""Do other questions rank the same heads first? The ranking is repeated with the questions of other seeds and probes.

Between every two rankings: Spearman's rank correlation over the heads that both measured, with its interval over heads, and how
many of the leading heads they share. Within each: which of the five best heads by exact measurement the ten best by
attribution lack (the prefilter's misses). And as a test on questions that did not choose them: what the first ranking's leading
heads are worth on the others' questions, beside heads drawn at random.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from surgery.locating.questions import described
from surgery.records.record import Record
from surgery.records.site import Site, SiteText
from surgery.statistics import Accuracy, Estimate, correlation, mean, proportion

ScoreName = Literal["splice_loss", "ablation_loss", "attribution"]

EXACT, PREFILTERED = 5, 10  # the exact leading five should be among attribution's leading ten
TOPS = (1, 5, 10)


class Repeat(Record):
    """One of the rankings. leading: its first ten heads by the score that ranks. missed: its exact leading five that are not
    among attribution's leading ten; None unless all heads were measured both ways."""

    probe: dict[str, Any]
    seed: int
    base_accuracy: Accuracy
    leading: tuple[SiteText, ...]
    missed: tuple[SiteText, ...] | None


class Agreement(Record):
    """Between two rankings (their numbers among the repeats), by one score. shared: how many of the leading 1, 5, 10 heads are
    the same in both."""

    between: tuple[int, int]
    score: ScoreName
    correlation: Estimate | None
    shared: dict[int, int]


class Stability(Record):
    """score: what ranks. repeats: the rankings, the first of which is the one reported. leading, drawn: the mean score of the
    first ranking's leading five heads, and of heads drawn at random, on the other rankings' questions (nats; of attribution,
    the slope, which ranks heads and is no gain)."""

    score: ScoreName
    repeats: tuple[Repeat, ...]
    agreements: tuple[Agreement, ...]
    leading: Estimate
    drawn: Estimate | None

    def table(self) -> tuple[list[str], list[list[str]]]:
        """A row for every two rankings and score."""
        rows = []
        for agreement in self.agreements:
            names = [f"{described(**self.repeats[i].probe)}, seed {self.repeats[i].seed}" for i in agreement.between]
            shared = [f"{agreement.shared[top]}/{top}" if top in agreement.shared else "" for top in TOPS]
            rows.append([*names, agreement.score.replace("_", " "), str(agreement.correlation or ""), *shared])
        return ["ranking", "and", "by", "rank correlation", *(f"top {top} shared" for top in TOPS)], rows

    def summary(self) -> str:
        """What the table does not show, in a sentence or two."""
        drawn = f", heads drawn at random {self.drawn}" if self.drawn else ""
        what = {"splice_loss": "save", "ablation_loss": "cost when ablated", "attribution": "have a slope of"}[self.score]
        unit = "nats per unit of gate" if self.score == "attribution" else "nats"
        said = f"On the other rankings' questions the first one's leading {EXACT} heads {what} {self.leading} {unit}{drawn}."
        misses = [len(repeat.missed) for repeat in self.repeats if repeat.missed is not None]
        if misses:
            said += (
                f" Attribution's leading {PREFILTERED} lack {sum(misses)} of the {EXACT * len(misses)} exact leading {EXACT}."
            )
        return said


@dataclass(frozen=True)
class Scores:
    """What one set of questions says. correct (examples,): of the base. columns: score -> (examples, sites), NaN where a site
    was not measured."""

    probe: dict[str, Any]
    seed: int
    correct: np.ndarray
    columns: dict[ScoreName, np.ndarray]

    def centres(self, score: ScoreName) -> np.ndarray:
        """(sites,): means over the questions that were asked; NaN where none was."""
        values = self.columns[score]
        counts = (~np.isnan(values)).sum(0)
        return np.divide(np.nansum(values, axis=0), counts, out=np.full(len(counts), np.nan), where=counts > 0)

    def leading(self, score: ScoreName, top: int) -> list[int]:
        """Indices of the best sites that were measured, best first."""
        centres = self.centres(score)
        order = (-centres).argsort(kind="stable")  # NaN sorts last
        return [int(i) for i in order[:top] if not np.isnan(centres[i])]


def stability(sites: Sequence[Site], scores: Sequence[Scores], score: ScoreName, drawn: Sequence[Site]) -> Stability:
    """Compare two rankings or more. Each has measured `drawn`, and the leading five of the first, on all of its questions."""
    first, *others = scores
    at = {site: i for i, site in enumerate(sites)}
    return Stability(
        score=score,
        repeats=tuple(_repeat(sites, ranking, score) for ranking in scores),
        agreements=tuple(
            _agreement(pair, scores[pair[0]], scores[pair[1]], name)
            for name in first.columns for pair in combinations(range(len(scores)), 2)
        ),
        leading=_on_others(others, score, first.leading(score, EXACT)),
        drawn=_on_others(others, score, [at[site] for site in drawn]) if drawn else None,
    )  # fmt: skip


def _repeat(sites: Sequence[Site], ranking: Scores, score: ScoreName) -> Repeat:
    missed = None
    if score != "attribution" and "attribution" in ranking.columns and not np.isnan(ranking.centres(score)).any():
        passed = set(ranking.leading("attribution", PREFILTERED))
        missed = tuple(sites[i] for i in ranking.leading(score, EXACT) if i not in passed)
    return Repeat(
        probe=ranking.probe, seed=ranking.seed, base_accuracy=proportion(ranking.correct),
        leading=tuple(sites[i] for i in ranking.leading(score, max(TOPS))), missed=missed,
    )  # fmt: skip


def _agreement(pair: tuple[int, int], first: Scores, second: Scores, score: ScoreName) -> Agreement:
    both = np.stack([first.centres(score), second.centres(score)])
    measured = both[:, ~np.isnan(both).any(0)]
    shared = {top: (set(first.leading(score, top)), set(second.leading(score, top))) for top in TOPS}
    return Agreement(
        between=pair, score=score, correlation=correlation(*measured),
        shared={top: len(a & b) for top, (a, b) in shared.items() if len(a) == len(b) == top},
    )  # fmt: skip


def _on_others(others: Sequence[Scores], score: ScoreName, chosen: list[int]) -> Estimate:
    return mean(np.concatenate([ranking.columns[score][:, chosen].mean(1) for ranking in others]))
