"""Intervals and tests. Everything here is a thin choice among scipy's methods, made once."""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from scipy import stats

from surgery.records import Record

RESAMPLES = 2000
LEVEL, POWER = 0.05, 0.8
Key = TypeVar("Key")


class Estimate(Record):
    """A mean with its 95% interval over n examples."""

    value: float
    ci95: tuple[float, float]
    n: int

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.ci95[0]:+.3f}, {self.ci95[1]:+.3f}]"


class Proportion(Record):
    """An accuracy with its 95% interval (Wilson) over n examples."""

    accuracy: float
    ci95: tuple[float, float]
    n: int

    def __str__(self) -> str:
        return f"{self.accuracy:.3f} [{self.ci95[0]:.3f}, {self.ci95[1]:.3f}]"


class Evidence(Record):
    """Whether a model differs from its base on the same n examples.

    p: two-sided, by McNemar's exact test for decisions, by the paired t-test for other numbers. p_holm: the same, corrected by
    Holm's method for all comparisons that were made together. differs: p_holm is below 5%. detectable: the
    smallest true difference that would be found in four of five such measurements, correction included (in the unit of the
    values: a share of right decisions, or nats); None where n is too small to say.
    """

    p: float
    p_holm: float
    differs: bool
    detectable: float | None
    n: int


def proportion(correct: np.ndarray) -> Proportion:
    """From per-example decisions."""
    hits, n = int(correct.sum()), len(correct)
    interval = stats.binomtest(hits, n).proportion_ci(method="wilson")
    return Proportion(accuracy=hits / n, ci95=(float(interval.low), float(interval.high)), n=n)


def mean(values: np.ndarray, seed: int = 0) -> Estimate:
    """The mean of per-example values with a percentile bootstrap interval over examples.

    For a difference of two models on the same examples, pass the differences: the interval is then paired.
    """
    values = np.asarray(values, dtype=float)
    centre = float(values.mean())
    if len(values) < 2 or np.ptp(values) == 0:
        return Estimate(value=centre, ci95=(centre, centre), n=len(values))
    interval = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed), vectorized=True
    ).confidence_interval
    return Estimate(value=centre, ci95=(float(interval.low), float(interval.high)), n=len(values))


def means(values: np.ndarray, seed: int = 0) -> list[Estimate | None]:
    """For every column of `values` (examples, sites) the mean with its interval over examples: what `mean` gives, but all
    columns share the draws, since a Mamba-1 has thousands of heads. A NaN was not measured; None for a column that holds
    nothing else."""
    values = np.asarray(values, dtype=float)
    n, sites = values.shape
    partial = np.isnan(values)
    if n < 2:
        return [None if missing.all() else mean(column) for column, missing in zip(values.T, partial.T, strict=True)]
    drawn = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    counts = np.zeros((RESAMPLES, n), dtype=np.float64)
    np.add.at(counts, (np.arange(RESAMPLES)[:, None], drawn), 1)
    out: list[Estimate | None] = []
    for start in range(0, sites, 1024):
        part = values[:, start : start + 1024]
        bounds = np.percentile(counts @ part / n, (2.5, 97.5), axis=0)
        for column, missing, low, high in zip(part.T, partial.T[start:], *bounds, strict=False):
            if missing.any():
                out.append(None if missing.all() else mean(column[~missing]))
                continue
            centre = float(column.mean())
            interval = (centre, centre) if np.ptp(column) == 0 else (float(low), float(high))
            out.append(Estimate(value=centre, ci95=interval, n=n))
    return out


def correlation(one: np.ndarray, other: np.ndarray, seed: int = 0) -> Estimate | None:
    """Spearman's rank correlation with a percentile bootstrap interval over the pairs; None for fewer than three, or where one
    side is constant."""
    if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None

    def spearman(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
        x, y = (ranks - ranks.mean(axis, keepdims=True) for ranks in (stats.rankdata(v, axis=axis) for v in (x, y)))
        scale = np.sqrt((x**2).sum(axis) * (y**2).sum(axis))
        return (x * y).sum(axis) / np.where(scale > 0, scale, 1)  # a resample of equal values agrees with nothing

    interval = stats.bootstrap(
        (one, other), spearman, paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile",
        batch=max(1, 10**6 // len(one)), rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Estimate(value=float(spearman(one, other)), ci95=(float(interval.low), float(interval.high)), n=len(one))


def evidence(pairs: Mapping[Key, tuple[np.ndarray, np.ndarray]]) -> dict[Key, Evidence]:
    """What each pair (the base's values, a model's; example by example) says. All pairs given are one family for Holm."""
    p = [_p_value(np.asarray(b, dtype=float), np.asarray(m, dtype=float)) for b, m in pairs.values()]
    corrected = holm(np.array(p))
    return {
        key: Evidence(
            p=p[i],
            p_holm=float(corrected[i]),
            differs=bool(corrected[i] < LEVEL),
            detectable=_detectable(*pairs[key], LEVEL / len(p)),
            n=len(pairs[key][0]),
        )
        for i, key in enumerate(pairs)
    }


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's correction: the chance of one false find among all is at most that at which a corrected value is called small."""
    order = np.argsort(p)
    raised = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(raised, 1)
    return corrected


def decisions(values: np.ndarray) -> bool:
    """Whether all values are right or wrong, 1 or 0."""
    return bool(np.isin(values, (0, 1)).all())


def _p_value(base: np.ndarray, model: np.ndarray) -> float:
    difference = model - base
    if len(difference) < 2 or not difference.any():
        return 1.0
    if decisions(base) and decisions(model):  # McNemar: are the examples that only one of the two gets right evenly split?
        return float(stats.binomtest(int((difference > 0).sum()), int(np.count_nonzero(difference))).pvalue)
    return float(stats.ttest_1samp(difference, 0).pvalue)


def _detectable(base: np.ndarray, model: np.ndarray, level: float) -> float | None:
    n = len(base)
    if n < 2:
        return None
    difference = np.asarray(model, dtype=float) - np.asarray(base, dtype=float)
    if decisions(base) and decisions(model):  # Laplace's rule: no disagreement among n is not none at all
        spread = np.sqrt((np.count_nonzero(difference) + 1) / (n + 2))
    else:
        spread = difference.std(ddof=1)
    return float((stats.norm.isf(level / 2) + stats.norm.isf(1 - POWER)) * spread / np.sqrt(n))
