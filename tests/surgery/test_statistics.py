"""How often intervals hold what they are to hold (simulated, seeded). Evidence: Holm's correction, what n can see, and how
often two copies of one model would be called different."""

import numpy as np
import pytest
from scipy import stats

from surgery.statistics import (
    LEVEL,
    correlation,
    difference,
    evidence,
    holm,
    intervals,
    mean,
    means,
    proportion,
    shares,
    written,
)

SIZES = (50, 100, 500, 1000)
SIMULATIONS = 2000
LEAST = 0.93  # of what is called 95%


def covered(values, truth, **options):
    """The share of the columns whose interval holds the truth."""
    found = intervals(values, **options)
    return ((found.low <= truth + 1e-12) & (found.high >= truth - 1e-12)).mean()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("disagreement", [0, 0.002, 0.015, 0.1])
def test_paired_differences_of_decisions_are_covered(n, disagreement):
    """However the examples on which the two models disagree are split between them."""
    rng = np.random.default_rng(n)
    for share in (0.5, 0.8, 1.0, 0.0) if disagreement else (0.5,):
        up, down = disagreement * share, disagreement * (1 - share)
        draw = rng.random((n, SIMULATIONS), dtype=np.float32)
        values = (draw < up).astype(float) - (draw > 1 - down)
        assert covered(values, up - down, decisions=True) >= LEAST


def test_models_that_agree_on_all_examples_may_still_differ():
    same = np.ones(1000)
    low, high = difference(same, same).ci95
    assert 0.002 < high == -low < 0.004  # none of 1,000: at most 3 to 4 in a thousand
    assert mean(np.zeros(1000)).ci95 == (0, 0)  # of other numbers, equal ones have no spread
    assert difference(same, same - 0.5).ci95 == (-0.5, -0.5)
    assert difference(np.zeros(3), np.ones(3)).ci95[1] == 1
    assert mean(np.array([1.0, np.nan])).n == 2
    assert np.isnan(mean(np.array([1.0, np.nan])).value)


@pytest.mark.parametrize("n", SIZES)
def test_accuracies_are_covered(n):
    """Exactly: over all numbers of right answers that are likely at all."""
    hits = np.arange(n + 1)
    bounds = {}
    for errors in (0, 0.002, 0.0035, 0.01, 0.1, 0.5):
        chance = stats.binom.pmf(hits, n, 1 - errors)
        total = 0.0
        for k in np.flatnonzero(chance > 1e-6):
            if k not in bounds:
                bounds[k] = proportion(np.arange(n) < k).ci95
            total += chance[k] * (bounds[k][0] - 1e-12 <= 1 - errors <= bounds[k][1] + 1e-12)
        assert total >= LEAST


DRAWS = {  # per-example losses, or differences of them, and their mean
    "normal": (lambda rng, shape: rng.normal(size=shape), 0),
    "heavy tails": (lambda rng, shape: rng.standard_t(3, size=shape), 0),
    "exponential": (lambda rng, shape: rng.exponential(size=shape), 1),
    "lognormal": (lambda rng, shape: rng.lognormal(size=shape), np.exp(0.5)),
    "nearly all small": (lambda rng, shape: rng.gamma(0.1, size=shape), 0.1),
    "two lognormals": (
        lambda rng, shape: rng.lognormal(size=shape) - rng.lognormal(0, 0.9, shape),
        np.exp(0.5) - np.exp(0.405),
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_means_are_covered(name):
    draw, truth = DRAWS[name]
    for n in SIZES:
        assert covered(draw(np.random.default_rng(n), (n, SIMULATIONS)), truth) >= LEAST


def test_losses_per_token_are_covered_where_the_number_of_tokens_varies():
    """Every example has some tokens, of which each has a loss of 2 nats in the mean; a second model's losses are .1 below."""
    rng = np.random.default_rng(0)
    for n in (100, 500):
        counts = rng.poisson(rng.gamma(1.0, 3.0, size=(n, SIMULATIONS)))
        sums = rng.gamma(np.maximum(counts, 1) * 2.0, 1.0) * (counts > 0)
        other = sums + counts * -0.1 + rng.normal(0, 0.2, counts.shape) * counts**0.5
        values, others = (
            np.stack([shares(of[:, i], counts[:, i]) for i in range(SIMULATIONS)], axis=1) for of in (sums, other)
        )
        assert values.mean(0) == pytest.approx(sums.sum(0) / counts.sum(0))
        assert covered(values, 2.0) >= LEAST
        assert covered(others - values, -0.1) >= LEAST
        naive = intervals(sums / counts.mean(0))
        found = intervals(values)
        assert (found.high - found.low).mean() < 0.5 * (naive.high - naive.low).mean()
    assert (shares(np.zeros(3), np.zeros(3)) == 0).all()


def test_many_intervals_at_once_are_rarely_wrong_anywhere():
    """32 heads that do nothing, on 256 questions: how often is any called something?"""
    rng = np.random.default_rng(0)
    values = rng.gamma(0.5, size=(256, 32 * 300)) - 0.5
    draw = rng.random((256, 32 * 300))
    for what, options in ((values, {}), ((draw < 0.05).astype(float) - (draw > 0.95), {"decisions": True})):
        found = intervals(what, level=LEVEL / 32, **options)
        wrong = (found.low > 0) | (found.high < 0)
        assert wrong.reshape(300, 32).any(1).mean() <= 0.07
        alone = intervals(what, **options)
        assert ((alone.low > 0) | (alone.high < 0)).reshape(300, 32).any(1).mean() > 0.5


@pytest.mark.parametrize("n", [5, 8, 20, 100])
def test_rank_correlations_are_covered(n):
    rng = np.random.default_rng(n)
    for rho in (0.0, 0.6, 0.99, -0.9):
        truth, held = 6 / np.pi * np.arcsin(rho / 2), 0
        for _ in range(200):
            one, noise = rng.normal(size=(2, n))
            low, high = correlation(one, rho * one + np.sqrt(1 - rho**2) * noise).ci95
            held += low <= truth <= high
        assert held / 200 >= LEAST


def test_a_verdict_agrees_with_its_interval():
    """What is found different leaves 0 out of its own interval: McNemar's test beside the interval of decisions, for all that
    can happen; the t-test beside the interval of other numbers, both ways."""
    for n in (6, 30, 1000):
        up, down = np.indices((n + 1, n + 1)).reshape(2, -1)
        likely = (up + down <= min(n, 300)) & (up + down > 0)
        up, down = up[likely], down[likely]
        different = 2 * stats.binom.cdf(np.minimum(up, down), up + down, 0.5) < LEVEL
        values = np.zeros((n, different.sum()))
        rows = np.arange(n)[:, None]
        values[rows < up[different]] = 1
        values[rows >= n - down[different]] = -1
        found = intervals(values, decisions=True)
        assert len(values.T)
        assert ((found.low > 0) | (found.high < 0)).all()
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(300):
        base = np.zeros(40)
        model = rng.choice([-1, 1]) * (rng.lognormal(size=40) - rng.choice([1.3, 1.6, 2.0]))
        low, high = difference(base, model).ci95
        verdicts.append(evidence({"loss": (base, model)})["loss"].differs)
        assert verdicts[-1] == (low > 0 or high < 0)
    assert 30 < sum(verdicts) < 270


def test_skewness_makes_one_side_longer_and_none_shorter():
    values = np.random.default_rng(0).lognormal(size=(60, 3))
    values[:, 1] *= -1
    values[:, 2] = np.linspace(-1, 1, 60)  # even
    margin = stats.t.isf(LEVEL / 2, 59) * values.std(0, ddof=1) / np.sqrt(60)
    found = intervals(values)
    below, above = found.value - found.low, found.high - found.value
    assert above[0] > 1.05 * margin[0]
    assert below[1] > 1.05 * margin[1]
    np.testing.assert_allclose([below[0], above[1], below[2], above[2]], margin[[0, 1, 2, 2]], rtol=1e-9)
    shares = means(np.array([[1.0], [1], [1], [0.7]]), within=(0, 1))[0]
    assert shares.ci95[1] == 1


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.9, 0.8])) == pytest.approx([1, 1])


def test_p_values_are_those_of_the_named_tests():
    base = np.array([1.0] * 10 + [0.0] * 10)
    model = np.array([1.0] * 9 + [0.0] * 3 + [1.0] * 8)
    assert evidence({"kv": (base, model)})["kv"].p == stats.binomtest(1, 9).pvalue
    losses = np.linspace(1, 2, 20)
    noise = np.random.default_rng(0).normal(0.1, 0.1, 20)
    student = stats.ttest_rel(losses, losses + noise).pvalue
    assert evidence({"loss": (losses, losses + noise)})["loss"].p > 2 * student  # the tail is on the side of 0
    assert evidence({"loss": (losses, losses + 0.2 - noise)})["loss"].p < 0.9
    even = 0.1 + np.concatenate([noise, -noise])
    losses = np.linspace(1, 2, 40)
    assert evidence({"loss": (losses, losses + even)})["loss"].p == pytest.approx(stats.ttest_1samp(even, 0).pvalue)


def test_two_copies_of_a_model_rarely_differ():
    """200 comparisons over five tasks each: in at most 5% of them does any task differ. The copies have the same chance of
    being right on each example, and decide for themselves."""
    false = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        pairs = {}
        for task, accuracy in (("kv.8", 0.9), ("kv.32", 0.5), ("kv.64", 0.3), ("knowledge", 0.95)):
            chance = rng.beta(4 * accuracy, 4 * (1 - accuracy), 200)
            pairs[task] = tuple((rng.random(200) < chance).astype(float) for _ in range(2))
        text = rng.normal(1.8, 0.3, 64)
        pairs["perplexity"] = tuple(text + rng.normal(0, 0.02, 64) for _ in range(2))
        false += any(said.differs for said in evidence(pairs).values())
    assert false <= 10


def test_what_n_can_see_is_seen_four_times_of_five():
    """Simulated at the difference that is called detectable."""
    rng = np.random.default_rng(0)
    seen, runs, n = 0, 300, 1000
    only_model, only_base = 0.09, 0.05  # 4 points, of 14% of examples on which the two disagree
    drawn = rng.choice(3, (runs, n), p=(1 - only_model - only_base, only_model, only_base))
    least = []
    for row in drawn:
        said = evidence({"kv": ((row == 2).astype(float), (row == 1).astype(float))})["kv"]
        least.append(said.detectable)
        seen += said.differs
    power = stats.norm.cdf(0.04 / (np.median(least) / (1.96 + 0.842)) - 1.96)  # of 4 points, from what is detectable
    assert seen / runs == pytest.approx(power, abs=0.06)


def test_what_is_detectable_counts_the_comparisons():
    """Of ten made together, each needs a difference as large as one alone does at a tenth of the level."""
    rng = np.random.default_rng(0)
    pair = (rng.random(300) < 0.5).astype(float), (rng.random(300) < 0.5).astype(float)
    alone, together = evidence({0: pair})[0], evidence(dict.fromkeys(range(10), pair))[0]
    power = stats.norm.isf(0.2)
    ratio = (stats.norm.isf(LEVEL / 20) + power) / (stats.norm.isf(LEVEL / 2) + power)
    assert together.detectable / alone.detectable == pytest.approx(ratio)


def test_copies_that_agree_everywhere():
    said = evidence({"kv": (np.ones(400), np.ones(400))})["kv"]
    assert (said.p, said.differs) == (1, False)
    assert 0 < said.detectable < 0.01
    assert evidence({"loss": (np.array([1.5]), np.array([1.6]))})["loss"].detectable is None


def test_figures_of_a_table():
    assert [written(value) for value in (0.5, 5.8514, 999.9994, -0.25)] == ["0.500", "5.851", "999.999", "-0.250"]
    assert [written(value) for value in (1000, 139632.312)] == ["1,000", "139,632"]
