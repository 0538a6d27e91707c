"""Intervals and tests, each chosen by its measured coverage. tests/surgery/test_statistics.py repeats the simulations.

A 95% interval is over examples, is not corrected for the number of intervals, and covers at least 93% from 50 examples on:

- an accuracy: Clopper and Pearson's exact interval. Wilson's covers 84% to 92% where about .2 errors are expected among all.
- a difference of two models' decisions on the same examples: Bonett and Price's adjusted Wald interval (J. Educ. Behav. Stat.
  37, 2012), which adds one example to either kind of disagreement. It has a width where nothing disagreed. In 1,506 cases (n,
  disagreement, its split, accuracy) it covered 93.5% or more; Agresti and Min's 86%, Tango's 92.9%, Newcombe's 93.3%, which is
  half as wide again where nothing disagreed. scipy has none of them.
- a mean of other numbers (losses, shares): Student's t interval, which holds under heavy but even tails, lengthened towards the
  longer tail as Hall's correction for skewness asks (J. R. Stat. Soc. B 54, 1992). Where one value in twenty decides the mean,
  or the tail is longer than a lognormal's of sigma 1, 50 examples are not enough: 85% and 92% there.
- a rank correlation: see `correlation`.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from pydantic import Field
from scipy import stats

from surgery.records.record import Record

LEVEL, POWER = 0.05, 0.8
CEILING = 0.98  # an accuracy above which hardly anything is left to gain
CHUNK = 4096  # columns at once: a Mamba-1 has thousands of heads
CACHED = 512  # of them, so many that a processor's cache holds what is computed of them
QUICK = 16_384  # columns; of more, intervals may be off by their last bit (see _moments)
Key = TypeVar("Key")


def written(value: float) -> str:
    """A figure of a table: three decimals; none from a thousand on, as a perplexity of text that the model never saw."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


class Estimate(Record):
    """A mean with its 95% interval over n examples. A single example has no interval: both ends are the value."""

    value: float
    ci95: tuple[float, float]
    n: int = Field(ge=0, lt=2**62)

    def __str__(self) -> str:
        """With signs, as for a difference."""
        return f"{self.value:+.3f} [{self.ci95[0]:+.3f}, {self.ci95[1]:+.3f}]"

    def unsigned(self) -> str:
        """For a mean that is no difference."""
        return f"{self.value:.3f} [{self.ci95[0]:.3f}, {self.ci95[1]:.3f}]"


class OverDocuments(Record):
    """A mean over documents, each of which counts once: the value with its interval, and where the value of one more document
    lies in 95% of cases."""

    mean: Estimate
    new: tuple[float, float]


class Proportion(Record):
    """An accuracy with its 95% interval (Clopper and Pearson's) over n examples."""

    accuracy: float
    ci95: tuple[float, float]
    n: int = Field(ge=0, lt=2**62)

    def __str__(self) -> str:
        return f"{self.accuracy:.3f} [{self.ci95[0]:.3f}, {self.ci95[1]:.3f}]"


class Evidence(Record):
    """Whether a model differs from its base on the same n examples.

    p: two-sided, by McNemar's exact test for decisions, by the paired t-test for other numbers (corrected for skewness as their
    interval is). p_holm: the same, corrected by Holm's method for all comparisons that were made together. differs: p_holm is
    below 5%; the difference's own 95% interval, which is not corrected, then excludes 0, too (the converse does not hold).
    detectable: the smallest true difference that would be found in four of five such measurements, correction included (in
    the unit of the values: a share of right decisions, or nats); None where n is too small to say.
    """

    p: float
    p_holm: float
    differs: bool
    detectable: float | None
    n: int


class Intervals(NamedTuple):
    """Of columns, each an array (columns,): the mean, both ends, and over how many examples; NaN for a column without any."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def proportion(correct: np.ndarray) -> Proportion:
    """From per-example decisions."""
    hits, n = int(correct.sum()), len(correct)
    interval = stats.binomtest(hits, n).proportion_ci(method="exact")
    return Proportion(accuracy=hits / n, ci95=(float(interval.low), float(interval.high)), n=n)


def share_right(correct: np.ndarray) -> Proportion:
    """As `proportion`, also where an example is more than one decision, and its value their number by the mean one."""
    if decisions(correct):
        return proportion(correct)
    estimate = mean(correct)
    low, high = np.clip(estimate.ci95, 0, 1).tolist()
    return Proportion(accuracy=estimate.value, ci95=(low, high), n=estimate.n)


def at_chance(accuracy: Proportion, chance: float) -> bool:
    """Whether the interval of an accuracy reaches what guessing gives."""
    return accuracy.ci95[0] <= chance


def mean(values: np.ndarray, *, decisions: bool = False) -> Estimate:
    """The mean of per-example values with its interval; NaN if any is.

    For a difference of two models on the same examples, pass the differences: the interval is then paired. decisions: they are
    differences of decisions, each -1, 0 or 1.
    """
    values = np.asarray(values, dtype=float)
    (estimate,) = means(values[:, None], decisions=decisions)
    if estimate is None or estimate.n < len(values):
        return Estimate(value=np.nan, ci95=(np.nan, np.nan), n=len(values))
    return estimate


def means(
    values: np.ndarray, *, decisions: bool = False, within: tuple[float, float] = (-np.inf, np.inf)
) -> list[Estimate | None]:
    """What `mean` gives for every column of `values` (examples, sites). A NaN was not measured; None for a column that holds
    nothing else, which costs next to nothing. within: the least and the largest value that there can be."""
    value, low, high, n = intervals(values, decisions=decisions)
    columns = (column.tolist() for column in (value, np.maximum(low, within[0]), np.minimum(high, within[1]), n))
    return [Estimate(value=value, ci95=(low, high), n=n) if n else None for value, low, high, n in zip(*columns, strict=True)]


def shares(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Per-example values whose mean is R = sum(sums) / sum(counts) and whose variance is that of this ratio, to first order:

        value_i = R + (sums_i - R counts_i) / mean(counts)

    sums, counts: of each example, (n,), a loss summed over tokens and their number say. An example with more tokens than
    others has more weight, and what varies is the loss, not the number of tokens. The differences of two models' values are
    those of their ratios. All 0 where nothing is counted. Source: the ratio estimator (Cochran, Sampling Techniques, 1977,
    chapter 6)."""
    if not counts.any():
        return np.zeros(len(counts))
    ratio = sums.sum() / counts.sum()
    return ratio + (sums - ratio * counts) / counts.mean()


def over_documents(values: np.ndarray) -> OverDocuments:
    """From one value of each document, two at least: a mean over its tokens, say, or a paired difference of two models there.

    Tokens, stretches and rows of a document go together, and documents differ from each other, so the document is the unit
    (Student's t; for a new one with its own spread added). One document says nothing about another."""
    values = np.asarray(values, dtype=float)
    n, centre, spread = len(values), float(values.mean()), float(values.std(ddof=1))
    t = float(stats.t.isf(LEVEL / 2, n - 1))
    margin, further = t * spread / np.sqrt(n), t * spread * np.sqrt(1 + 1 / n)
    interval = (float(centre - margin), float(centre + margin))
    return OverDocuments(
        mean=Estimate(value=centre, ci95=interval, n=n), new=(float(centre - further), float(centre + further))
    )


def difference(base: np.ndarray, model: np.ndarray) -> Estimate:
    """The mean of model - base, value by value, of decisions or of other numbers."""
    base, model = np.asarray(base, dtype=float), np.asarray(model, dtype=float)
    return mean(model - base, decisions=decisions(base) and decisions(model))


def intervals(values: np.ndarray, *, decisions: bool = False, level: float = LEVEL) -> Intervals:
    """The mean of every column of `values` (examples, columns), NaN where there is no value, and the interval that misses it
    with probability `level`. decisions: as in `mean`. For many columns at once, divide `level` by their number (Bonferroni)."""
    values = np.asarray(values)
    value, low, high = np.full((3, values.shape[1]), np.nan)
    out = Intervals(value, low, high, np.zeros(values.shape[1], dtype=int))
    measured = np.flatnonzero(~np.isnan(values).all(0))
    for start in range(0, len(measured), CHUNK):
        columns = measured[start : start + CHUNK]
        for few in np.array_split(columns, -(-len(columns) // CACHED)):
            part = values[:, few].astype(float)
            n = (~np.isnan(part)).sum(0)
            if decisions:
                estimates = _bonett_price((part > 0).sum(0), (part < 0).sum(0), n, level)
            else:
                estimates = _student_hall(part, n, level, quick=len(measured) > QUICK)
            for whole, piece in zip(out, (*estimates, n), strict=True):
                whole[few] = piece
    return out


def _bonett_price(gained: np.ndarray, lost: np.ndarray, n: np.ndarray, level: float) -> tuple[np.ndarray, ...]:
    """(mean, low, high) from how many of n examples only the model, or only the base, got right."""
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    margin = stats.norm.isf(level / 2) * np.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return (gained - lost) / n, np.maximum(up - down - margin, -1), np.minimum(up - down + margin, 1)


def _student_hall(values: np.ndarray, n: np.ndarray, level: float, *, quick: bool = False) -> tuple[np.ndarray, ...]:
    """(mean, low, high) of columns with n values each; a column that does not vary has no width. quick: as for _moments."""
    centre, error, asymmetry = _moments(values, n, quick=quick)
    t = stats.t.isf(level / 2, np.maximum(n - 1, 1))
    low = centre - error * np.maximum(t, _unskewed(t, asymmetry))
    high = centre + error * np.maximum(t, -_unskewed(-t, asymmetry))
    return centre, low, high


def _moments(values: np.ndarray, n: np.ndarray, *, quick: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of columns with n values each: the mean, its standard error, and the skewness by the root of n. quick: cubes as products,
    which numpy's power, right to the last bit, takes thirty times as long for."""
    missing = np.isnan(values)
    some = missing.any()
    first = (
        np.take_along_axis(values, (~missing).argmax(0)[None], 0)[0] if some else values[0]
    )  # equal values differ by exactly 0

    def without_missing(away: np.ndarray) -> np.ndarray:
        if some:
            away[missing] = 0
        return away

    away = without_missing(values - first)
    shift = away.sum(0) / n
    away = without_missing(away - shift)
    cubes = away * away * away if quick else away**3
    spread = np.sqrt((away**2).sum(0) / np.maximum(n - 1, 1))
    scale = (n - 1.0) * (n - 2) * spread**3
    skewness = np.divide(n * cubes.sum(0), scale, out=np.zeros(len(n)), where=scale > 0)
    return first + shift, spread / np.sqrt(n), skewness / np.sqrt(n)


def _skewed(t: np.ndarray, asymmetry: np.ndarray) -> np.ndarray:
    """Hall's transformation of Student's statistic: its distribution is the t distribution's up to terms in 1 / n."""
    return t + asymmetry * t**2 / 3 + asymmetry**2 * t**3 / 27 + asymmetry / 6


def _unskewed(t: np.ndarray, asymmetry: np.ndarray) -> np.ndarray:
    """Its inverse."""
    flat = np.abs(asymmetry) < 1e-9
    bend = np.where(flat, 1, asymmetry)
    return np.where(flat, t, 3 / bend * (np.cbrt(1 + bend * (t - bend / 6)) - 1))


def correlation(first: np.ndarray, second: np.ndarray) -> Estimate | None:
    """Spearman's rank correlation with its interval over the pairs; None for fewer than four, or where one side is constant.

    The interval is the wider, at each end, of Bonett and Wright's (Psychometrika 65, 2000), which holds for few pairs, and of
    one from the statistic's influence values, which holds where the pairs agree almost everywhere. Of normal pairs with
    correlations up to .997 it covered 95% or more, from 5 pairs on.
    """
    n = len(first)
    if n < 4 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    x, y = ((stats.rankdata(v) - (n + 1) / 2) / n for v in (first, second))
    rho = float(np.clip((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()), -1, 1))
    t = stats.t.isf(LEVEL / 2, n - 2)
    influence = (12 * (x * y + _mean_above(x, y) + _mean_above(y, x))).std(ddof=1) / np.sqrt(n)
    least = 6 / (n * (n**2 - 1))  # half of what the smallest disagreement takes from 1
    inside = np.clip(rho, least - 1, 1 - least)
    margin = t * np.sqrt((1 + inside**2 / 2) / (n - 3))
    low = min(rho - t * influence, np.tanh(np.arctanh(inside) - margin) if rho > least - 1 else -1)
    high = max(rho + t * influence, np.tanh(np.arctanh(inside) + margin) if rho < 1 - least else 1)
    return Estimate(value=rho, ci95=(max(-1.0, float(low)), min(1.0, float(high))), n=n)


def _mean_above(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """For every x, the sum of y over the pairs whose x is larger (a tie counts half), by the number of pairs."""
    order = np.argsort(x, kind="stable")
    total = np.concatenate([[0], y[order].cumsum()])
    left, right = (total[np.searchsorted(x[order], x, side)] for side in ("left", "right"))
    return (total[-1] - (left + right) / 2) / len(x)


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


def changed_decisions(values: np.ndarray) -> bool:
    """Whether all values are differences of decisions, NaN where there is none."""
    return bool((np.isin(values, (-1, 0, 1)) | np.isnan(values)).all())


def _p_value(base: np.ndarray, model: np.ndarray) -> float:
    change = model - base
    if len(change) < 2 or not change.any():
        return 1.0
    if decisions(base) and decisions(model):  # McNemar: are the examples that only one of the two gets right evenly split?
        return float(stats.binomtest(int((change > 0).sum()), int(np.count_nonzero(change))).pvalue)
    (centre,), (error,), asymmetry = _moments(change[:, None], np.array([len(change)]))
    if error == 0:
        return 0.0
    t = np.array([centre / error])
    return float(2 * stats.t.sf(np.minimum(abs(t), abs(_skewed(t, asymmetry))), len(change) - 1)[0])  # as their interval


def _detectable(base: np.ndarray, model: np.ndarray, level: float) -> float | None:
    n = len(base)
    if n < 2:
        return None
    change = np.asarray(model, dtype=float) - np.asarray(base, dtype=float)
    laplace = np.sqrt((np.count_nonzero(change) + 1) / (n + 2))  # no disagreement among n is not none at all
    spread = laplace if decisions(base) and decisions(model) else change.std(ddof=1)
    return float((stats.norm.isf(level / 2) + stats.norm.isf(1 - POWER)) * spread / np.sqrt(n))
