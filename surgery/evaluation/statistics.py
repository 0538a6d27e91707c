"""Intervals and tests, each chosen by its measured coverage. tests/surgery/evaluation/test_statistics.py repeats the
simulations.

A 95% interval is over questions and covers at least 93% from 50 questions on:

- an accuracy: Clopper and Pearson's exact interval. Wilson's covers 84% to 92% where few errors are expected among all
  questions.
- a difference of two models' decisions on the same questions: Bonett and Price's adjusted Wald interval (J. Educ. Behav. Stat.
  37, 2012), which adds one question to either kind of disagreement. It has a width where nothing disagreed. scipy has no such
  interval.
- a mean of other numbers (losses, say): Student's t interval, lengthened towards the longer tail as Hall's correction for
  skewness asks (J. R. Stat. Soc. B 54, 1992).
- a ratio of two mean differences: Fieller's set (Suppl. J. R. Stat. Soc. 7, 1940) with that same interval. Over five or ten
  seeds of which one in seven gains nothing it covers 93%; with Student's, as he has it, 89% and 91%.

A report declares one main comparison before anything is measured. Its p-value is not corrected, however many controls stand
beside it; those of all other comparisons are corrected by Holm's method, among themselves.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import optimize, stats

from surgery.records.ranking import Estimate

LEVEL, POWER = 0.05, 0.8
Key = TypeVar("Key")


class Intervals(NamedTuple):
    """The mean of each column and both ends of its interval, each (columns,), and the number of questions."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int


def is_decisions(values: np.ndarray) -> bool:
    """Whether all values are right or wrong: 1 or 0."""
    return bool(np.isin(values, (0, 1)).all())


def estimate(values: np.ndarray, *, decisions: bool | None = None, level: float = LEVEL) -> Estimate:
    """The mean of one value a question, with its interval: Clopper and Pearson's for decisions, else Student's and Hall's. A
    single number that is no decision has no interval: both ends are the value. decisions: by default whether all values are 0
    or 1. level: as in column_intervals. Raises ValueError for no values."""
    values = np.asarray(values, dtype=float)
    if not len(values):
        raise ValueError("an estimate needs at least one value")
    if is_decisions(values) if decisions is None else decisions:
        right, n = int(values.sum()), len(values)
        interval = stats.binomtest(right, n).proportion_ci(1 - level, method="exact")
        return Estimate(mean=right / n, low=float(interval.low), high=float(interval.high), n=n)
    return _first(column_intervals(values[:, None], level=level))


def difference(base: np.ndarray, model: np.ndarray) -> Estimate:
    """The mean of model - base, question by question, with its paired interval. base, model: (questions,)."""
    base, model = np.asarray(base, dtype=float), np.asarray(model, dtype=float)
    return _first(column_intervals((model - base)[:, None], decisions=is_decisions(base) and is_decisions(model)))


def column_intervals(values: np.ndarray, *, decisions: bool = False, level: float = LEVEL) -> Intervals:
    """The mean of every column of values (questions, columns), and the interval that misses it with probability `level`.
    decisions: the values are differences of decisions, each -1, 0 or 1. For many columns at once, divide `level` by their
    number (Bonferroni)."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    if decisions:  # from how many questions only the one model, or only the other, got right
        up, down = ((values > 0).sum(0) + 1) / (n + 2), ((values < 0).sum(0) + 1) / (n + 2)
        margin = stats.norm.isf(level / 2) * np.sqrt((up + down - (up - down) ** 2) / (n + 2))
        low, high = np.maximum(up - down - margin, -1), np.minimum(up - down + margin, 1)
        return Intervals(values.sum(0) / n, low, high, n)
    mean, error, skewness = _moments(values)
    t = stats.t.isf(level / 2, max(n - 1, 1))
    low = mean - error * np.maximum(t, _inverse_hall(t, skewness))
    high = mean + error * np.maximum(t, -_inverse_hall(-t, skewness))
    return Intervals(mean, low, high, n)


def share_closed(base: np.ndarray, edited: np.ndarray, full: np.ndarray) -> Estimate | None:
    """The share of the gap base -> full that an edit closes, (edited - base) / (full - base), with its 95% interval.

    base, edited, full: (n,) each, one value a question; or, where several seeds were trained, one mean a seed, whose questions
    are its own: the interval is then over both. It holds every share r at which the mean of (edited - base) - r (full - base)
    may be 0 (Fieller), by the interval that means of other numbers have here. The share may be negative or above 1. None where
    the gap itself is not shown, that is where the interval of full - base reaches 0, because Fieller's set is then not bounded.
    Of decisions the interval counts one question more that was gained and one that was not, as that of a difference does:
    otherwise it would have no width where all are gained.
    """
    base, edited, full = (np.asarray(values, dtype=float) for values in (base, edited, full))
    gain, gap, n = edited - base, full - base, len(base)
    if n < 3 or any(each.low <= 0 <= each.high for each in (difference(base, full), _first(column_intervals(gap[:, None])))):
        return None
    share = float(gain.mean() / gap.mean())
    gain, gap = gain * np.sign(gap.mean()), gap * np.sign(gap.mean())  # of a gap below 0 the same share
    if is_decisions(np.stack([base, edited, full])):
        gain, gap = np.append(gain, (1, 0)), np.append(gap, (1, 1))

    def inside(r: float) -> float:
        """At least 0 where r is in the set."""
        rest = _first(column_intervals((gain - r * gap)[:, None]))
        return min(rest.high, -rest.low)

    def end(step: float) -> float:
        while inside(share + step) >= 0:
            step *= 2
        return float(optimize.brentq(inside, share, share + step)) if inside(share) > 0 else share

    return Estimate(mean=share, low=end(-1e-3), high=end(1e-3), n=n)


def p_value(base: np.ndarray, model: np.ndarray) -> float:
    """Two-sided, for "the two do not differ on the same questions": McNemar's exact test for decisions, else the paired t-test
    with Hall's correction, as in its interval."""
    base, model = np.asarray(base, dtype=float), np.asarray(model, dtype=float)
    change = model - base
    if len(change) < 2 or not change.any():
        return 1.0
    if is_decisions(base) and is_decisions(model):
        return float(stats.binomtest(int((change > 0).sum()), int(np.count_nonzero(change))).pvalue)
    mean, error, skewness = _moments(change[:, None])
    if error[0] == 0:
        return 0.0
    t = mean / error
    # Hall's transformation of Student's statistic: its distribution is the t distribution's up to terms in 1 / n.
    hall = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6
    return float(2 * stats.t.sf(np.minimum(abs(t), abs(hall)), len(change) - 1)[0])


def corrected(p: Mapping[Key, float], main: Key | None) -> dict[Key, float]:
    """p-values as a report gives them: that of the main comparison as it is, the others' by Holm's method among themselves.
    main: its key, None if there is none."""
    others = sorted((value, i, key) for i, (key, value) in enumerate(p.items()) if key != main)
    result, least = dict(p), 0.0
    for rank, (value, _, key) in enumerate(others):
        least = max(least, min(1.0, value * (len(others) - rank)))
        result[key] = least
    return result


def detectable(base: np.ndarray, model: np.ndarray) -> float | None:
    """The smallest true difference that four of five such measurements would find; None where n is too small to say."""
    base, model = np.asarray(base, dtype=float), np.asarray(model, dtype=float)
    n, change = len(base), model - base
    if n < 2:
        return None
    if is_decisions(base) and is_decisions(model):
        spread = np.sqrt((np.count_nonzero(change) + 1) / (n + 2))  # no disagreement among n is not none at all
    else:
        spread = change.std(ddof=1)
    return float((stats.norm.isf(LEVEL / 2) + stats.norm.isf(1 - POWER)) * spread / np.sqrt(n))


def token_shares(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Values of examples whose mean is R = sum(sums) / sum(counts) and whose variance is that of this ratio, to first order:

        value_i = R + (sums_i - R counts_i) / mean(counts)

    sums, counts: (examples,), a loss summed over an example's tokens and their number. What varies is then the loss, and not
    the number of tokens. The differences of two models' values are those of their ratios. All 0 where nothing is counted.
    Source: the ratio estimator (Cochran, Sampling Techniques, 1977, chapter 6)."""
    if not counts.any():
        return np.zeros(len(counts))
    ratio = sums.sum() / counts.sum()
    return ratio + (sums - ratio * counts) / counts.mean()


def _first(intervals: Intervals) -> Estimate:
    mean, low, high = (float(of[0]) for of in intervals[:3])
    return Estimate(mean=mean, low=low, high=high, n=intervals.n)


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of columns: the mean, its standard error, and the skewness by the root of n."""
    n = len(values)
    away = values - values[0]  # so that equal values differ by exactly 0
    shift = away.sum(0) / n
    away = away - shift
    spread = np.sqrt((away * away).sum(0) / max(n - 1, 1))
    scale = (n - 1.0) * (n - 2) * spread**3
    skewness = np.divide(n * (away * away * away).sum(0), scale, out=np.zeros_like(scale), where=scale > 0)
    return values[0] + shift, spread / np.sqrt(n), skewness / np.sqrt(n)


def _inverse_hall(t: np.ndarray, skewness: np.ndarray) -> np.ndarray:
    """The inverse of Hall's transformation (p_value)."""
    flat = np.abs(skewness) < 1e-9
    bend = np.where(flat, 1, skewness)
    return np.where(flat, t, 3 / bend * (np.cbrt(1 + bend * (t - bend / 6)) - 1))
