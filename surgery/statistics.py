"""Intervals. Everything here is a thin choice among scipy's methods, made once."""

import numpy as np
from scipy import stats

from surgery.records import Record

RESAMPLES = 2000


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
