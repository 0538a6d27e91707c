"""Do other questions rank the same heads first? The ranking is repeated with the questions of other seeds and probes.

Between every two rankings: Spearman's rank correlation over the heads that both measured, with its interval over heads, and how
many of the leading heads they share. Within each: which of the five best heads by exact measurement the ten best by
attribution lack (the prefilter's misses). And as a test on questions that did not choose them: what the first ranking's leading
heads are worth on the others' questions, beside heads drawn at random.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from surgery.locating.heads import ScoreName
from surgery.locating.questions import probe_in_words
from surgery.records.record import Record
from surgery.records.site import Site, SiteText
from surgery.statistics import CHUNK, Estimate, Proportion, correlation, mean, share_right

EXACT, PREFILTERED = 5, 10  # the exact leading five should be among attribution's leading ten
TOPS = (1, 5, 10)


class Repeat(Record):
    """One of the rankings. leading: its first ten heads by the score that ranks. missed: its exact leading five that are not
    among attribution's leading ten; None unless all heads were measured both ways."""

    probe: dict[str, Any]
    seed: int
    base_accuracy: Proportion
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
            names = [f"{probe_in_words(**self.repeats[i].probe)}, seed {self.repeats[i].seed}" for i in agreement.between]
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
class ScoreColumn:
    """A score. values (examples, sites that were measured), NaN where one was not measured on an example. at: the numbers of
    these sites, in order; None: all."""

    values: np.ndarray
    at: np.ndarray | None = None

    def means(self) -> np.ndarray:
        """(sites that were measured,): over the examples on which each was."""
        total, counts = np.zeros((2, self.values.shape[1]))
        for start in range(0, len(total), CHUNK):
            part = self.values[:, start : start + CHUNK].astype(float)
            total[start : start + CHUNK], counts[start : start + CHUNK] = np.nansum(part, axis=0), (~np.isnan(part)).sum(0)
        return np.divide(total, counts, out=np.full(len(total), np.nan), where=counts > 0)

    def values_of(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """(examples, numbers): of sites that were measured, by number."""
        return self.values[:, numbers if self.at is None else np.searchsorted(self.at, numbers)].astype(float)


@dataclass(frozen=True)
class HeadScores:
    """What one set of questions says of the heads, `sites` in number. correct (examples,): of the base. means: score ->
    (sites,), if they were taken already."""

    probe: dict[str, Any]
    seed: int
    correct: np.ndarray
    columns: dict[ScoreName, ScoreColumn]
    sites: int
    means: dict[ScoreName, np.ndarray] = field(default_factory=dict)

    def centres(self, score: ScoreName) -> np.ndarray:
        """(sites,): means over the questions that were asked; NaN where none was."""
        if score not in self.means:
            column, centres = self.columns[score], np.full(self.sites, np.nan)
            centres[slice(None) if column.at is None else column.at] = column.means()
            self.means[score] = centres
        return self.means[score]

    def only(self, numbers: np.ndarray) -> "HeadScores":
        """The same with the values of some sites alone, by number; the means are of all."""
        columns: dict[ScoreName, ScoreColumn] = {}
        for score, column in self.columns.items():
            self.centres(score)
            here = np.unique(numbers) if column.at is None else np.intersect1d(numbers, column.at)
            columns[score] = ScoreColumn(column.values_of(here), here)
        return replace(self, columns=columns)

    def leading(self, score: ScoreName, top: int) -> list[int]:
        """Indices of the best sites that were measured, best first."""
        centres = self.centres(score)
        order = (-centres).argsort(kind="stable")[:top]  # NaN sorts last
        return order[~np.isnan(centres[order])].tolist()


def stability(
    site_of: Callable[[int], Site], scores: Sequence[HeadScores], score: ScoreName, drawn: Sequence[int]
) -> Stability:  # fmt: skip
    """Compare two rankings or more. Each has measured `drawn`, and the leading five of the first, on all of its questions.
    site_of: a site by its number."""
    first, *others = scores
    return Stability(
        score=score,
        repeats=tuple(_repeat(site_of, ranking, score) for ranking in scores),
        agreements=tuple(
            _agreement(pair, scores[pair[0]], scores[pair[1]], name)
            for name in first.columns for pair in combinations(range(len(scores)), 2)
        ),
        leading=_on_others(others, score, first.leading(score, EXACT)),
        drawn=_on_others(others, score, list(drawn)) if len(drawn) else None,
    )  # fmt: skip


def _repeat(site_of: Callable[[int], Site], ranking: HeadScores, score: ScoreName) -> Repeat:
    missed = None
    if score != "attribution" and "attribution" in ranking.columns and not np.isnan(ranking.centres(score)).any():
        passed = set(ranking.leading("attribution", PREFILTERED))
        missed = tuple(site_of(i) for i in ranking.leading(score, EXACT) if i not in passed)
    return Repeat(
        probe=ranking.probe, seed=ranking.seed, base_accuracy=share_right(ranking.correct),
        leading=tuple(site_of(i) for i in ranking.leading(score, max(TOPS))), missed=missed,
    )  # fmt: skip


def _agreement(pair: tuple[int, int], first: HeadScores, second: HeadScores, score: ScoreName) -> Agreement:
    both = np.stack([first.centres(score), second.centres(score)])
    measured = both[:, ~np.isnan(both).any(0)]
    shared = {top: (set(first.leading(score, top)), set(second.leading(score, top))) for top in TOPS}
    return Agreement(
        between=pair, score=score, correlation=correlation(*measured),
        shared={top: len(a & b) for top, (a, b) in shared.items() if len(a) == len(b) == top},
    )  # fmt: skip


def _on_others(others: Sequence[HeadScores], score: ScoreName, chosen: list[int]) -> Estimate:
    return mean(np.concatenate([ranking.columns[score].values_of(chosen).mean(1) for ranking in others]))
