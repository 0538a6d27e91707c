"""How often intervals hold what they are to hold (simulated, seeded), and that the tests are the named ones."""

import numpy as np
import pytest
from scipy import stats

from surgery.evaluation.statistics import (
    LEVEL,
    column_intervals,
    corrected,
    detectable,
    difference,
    estimate,
    p_value,
    share_closed,
    token_shares,
)

SIMULATIONS = 1500
LEAST = 0.93  # of what is called 95%


def covered(values, truth, **options):
    """The share of the columns whose interval holds the truth."""
    found = column_intervals(values, **options)
    return ((found.low <= truth + 1e-12) & (found.high >= truth - 1e-12)).mean()


@pytest.mark.parametrize("n", [50, 200, 1000])
@pytest.mark.parametrize("disagreement", [0, 0.002, 0.015, 0.1, 0.6])
def test_paired_differences_of_decisions_are_covered(n, disagreement):
    rng = np.random.default_rng(n)
    for share in (0.5, 0.8, 1.0, 0.0) if disagreement else (0.5,):
        up, down = disagreement * share, disagreement * (1 - share)
        draw = rng.random((n, SIMULATIONS), dtype=np.float32)
        values = (draw < up).astype(float) - (draw > 1 - down)
        assert covered(values, up - down, decisions=True) >= LEAST


@pytest.mark.parametrize("n", [50, 200, 1000])
def test_accuracies_are_covered(n):
    """Exactly: over all numbers of right answers that are likely at all."""
    right = np.arange(n + 1)
    bounds = {}
    for errors in (0, 0.002, 0.01, 0.1, 0.5):
        chance = stats.binom.pmf(right, n, 1 - errors)
        total = 0.0
        for k in np.flatnonzero(chance > 1e-5):
            if k not in bounds:
                bounds[k] = estimate(np.arange(n) < k)
            total += chance[k] * (bounds[k].low - 1e-12 <= 1 - errors <= bounds[k].high + 1e-12)
        assert total >= LEAST


DRAWS = {  # losses of questions, or differences of them, and their mean
    "normal": (lambda rng, shape: rng.normal(size=shape), 0),
    "heavy tails": (lambda rng, shape: rng.standard_t(3, size=shape), 0),
    "exponential": (lambda rng, shape: rng.exponential(size=shape), 1),
    "lognormal": (lambda rng, shape: rng.lognormal(size=shape), np.exp(0.5)),
    "nearly all small": (lambda rng, shape: rng.gamma(0.1, size=shape), 0.1),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("n", [50, 500])
def test_means_are_covered(name, n):
    draw, truth = DRAWS[name]
    assert covered(draw(np.random.default_rng(n), (n, SIMULATIONS)), truth) >= LEAST


@pytest.mark.parametrize(
    ("n", "truth", "gap"), [(100, 0.5, 0.5), (300, 0.2, 0.6), (300, 0.9, 0.3), (1000, 0.9, 0.1), (1000, -0.3, 0.2)]
)
def test_shares_of_a_gap_are_covered(n, truth, gap):
    """Decisions on the same questions: what the whole hybrid wins, the edit wins by the share `truth`, and some is lost by
    chance."""
    rng = np.random.default_rng(n)
    held = shown = 0
    for _ in range(400):
        base = rng.random(n) < 0.3
        full = np.where(base, True, rng.random(n) < gap / 0.7)
        edited = np.where(base, rng.random(n) < 1 - max(-truth * gap / 0.3, 0), rng.random(n) < max(truth * gap / 0.7, 0))
        found = share_closed(base, edited, full)
        assert share_closed(~base, ~edited, ~full) == found
        if found is not None:
            shown += 1
            held += found.low <= truth <= found.high
    assert shown >= 200
    assert held / shown >= LEAST


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_shares_over_seeds_are_covered(seeds):
    """One mean a seed: bases, edits and hybrids differ from seed to seed, and each is measured on questions of its own."""
    rng = np.random.default_rng(seeds)
    held = shown = 0
    for _ in range(600):
        base = rng.normal(0.3, 0.03, seeds)
        full = base + rng.normal(0.6, 0.05, seeds)
        edited = base + 0.7 * 0.6 + rng.normal(0, 0.06, seeds)
        found = share_closed(*(rng.binomial(300, np.clip(p, 0, 1)) / 300 for p in (base, edited, full)))
        if found is not None:
            shown += 1
            held += found.low <= 0.7 <= found.high
    assert shown >= 500
    assert held / shown >= LEAST


@pytest.mark.parametrize(("seeds", "least"), [(5, 0.91), (10, 0.92)])
def test_shares_over_seeds_are_covered_where_some_gain_nothing(seeds, least):
    """The study of the gap: a hybrid that answers everything, and bases of which one in seven gains nothing."""

    def draw(count):
        base = np.clip(rng.normal(0.25, 0.1, count), 0.01, 0.6)
        return base, base + np.where(rng.random(count) < 0.15, 0, rng.beta(4, 1.2, count)) * (1 - base)

    rng = np.random.default_rng(seeds)
    base, edited = draw(10**6)
    truth = (edited - base).mean() / (1 - base).mean()
    means = [[rng.binomial(200, p) / 200 for p in draw(seeds)] for _ in range(500)]
    shown = [found for each in means if (found := share_closed(*each, np.ones(seeds))) is not None]
    assert len(shown) > 450
    assert np.mean([each.low <= truth <= each.high for each in shown]) >= least


def test_a_share_is_not_certain_where_all_is_gained():
    right, base = np.ones(300), (np.arange(300) % 6 == 0).astype(float)
    found = share_closed(base, right, right)
    assert found.mean == 1
    assert 0.97 < found.low < 0.995


def test_no_share_of_a_gap_that_is_not_shown():
    rng = np.random.default_rng(0)
    base, edited, full = (rng.random((3, 200)) < 0.5).astype(float)
    assert share_closed(base, edited, full) is None
    assert share_closed(base, edited, base) is None
    assert share_closed([0.1, 0.2], [0.3, 0.4], [0.9, 0.8]) is None


def test_losses_per_token_are_covered_where_the_number_of_tokens_varies():
    """Every example has some tokens, each with a loss of 2 nats in the mean; a second model's losses are .1 below."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.gamma(1.0, 3.0, size=(200, 500)))
    sums = rng.gamma(np.maximum(counts, 1) * 2.0, 1.0) * (counts > 0)
    other = sums + counts * -0.1 + rng.normal(0, 0.2, counts.shape) * counts**0.5
    values, others = (np.stack([token_shares(of[:, i], counts[:, i]) for i in range(500)], axis=1) for of in (sums, other))
    assert values.mean(0) == pytest.approx(sums.sum(0) / counts.sum(0))
    assert covered(values, 2.0) >= LEAST
    assert covered(others - values, -0.1) >= LEAST
    assert (token_shares(np.zeros(3), np.zeros(3)) == 0).all()


def test_many_intervals_at_once_are_rarely_wrong_anywhere():
    """32 heads that do nothing, on 256 questions: how often is any called something?"""
    values = np.random.default_rng(0).gamma(0.5, size=(256, 32 * 200)) - 0.5
    for level, most, least in ((LEVEL / 32, 0.07, 0.0), (LEVEL, 1.0, 0.5)):
        found = column_intervals(values, level=level)
        wrong = ((found.low > 0) | (found.high < 0)).reshape(200, 32).any(1).mean()
        assert least <= wrong <= most


def test_models_that_agree_everywhere_may_still_differ():
    same = np.ones(1000)
    found = difference(same, same)
    assert 0.002 < found.high == -found.low < 0.004
    assert difference(same, same - 0.5).low == -0.5
    assert p_value(same, same) == 1
    assert 0 < detectable(same, same) < 0.01
    assert detectable(np.ones(1), np.ones(1)) is None
    with pytest.raises(ValueError, match="value"):
        estimate(np.zeros(0))


def test_p_values_are_those_of_the_named_tests():
    base = np.array([1.0] * 10 + [0.0] * 10)
    model = np.array([1.0] * 9 + [0.0] * 3 + [1.0] * 8)
    assert p_value(base, model) == stats.binomtest(1, 9).pvalue
    noise = np.random.default_rng(0).normal(0.1, 0.1, 20)
    even = 0.1 + np.concatenate([noise, -noise])
    losses = np.linspace(1, 2, 40)
    assert p_value(losses, losses + even) == pytest.approx(stats.ttest_1samp(even, 0).pvalue)


def test_a_p_value_agrees_with_its_interval():
    """What is found different leaves 0 out of its own interval: for all counts of decisions, and both ways for other
    numbers."""
    for n in (6, 30):
        for up in range(n + 1):
            for down in range(n + 1 - up):
                base = np.r_[np.zeros(up), np.ones(down), np.ones(n - up - down)]
                model = np.r_[np.ones(up), np.zeros(down), np.ones(n - up - down)]
                found = difference(base, model)
                assert p_value(base, model) >= LEVEL or found.low > 0 or found.high < 0
    rng = np.random.default_rng(0)
    for _ in range(100):
        base, model = np.zeros(40), rng.choice([-1, 1]) * (rng.lognormal(size=40) - rng.choice([1.3, 1.6, 2.0]))
        found = difference(base, model)
        assert (p_value(base, model) < LEVEL) == (found.low > 0 or found.high < 0)


def test_the_main_comparison_is_not_weakened_by_controls():
    p = {"main": 0.016, **{f"control {i}": 0.9 for i in range(48)}}
    assert corrected(p, "main")["main"] == 0.016
    assert corrected(p, None)["main"] == pytest.approx(0.016 * 49)
    assert list(corrected(dict(enumerate([0.01, 0.04, 0.03, 0.005])), None).values()) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_what_n_can_see_is_seen_four_times_of_five():
    rng = np.random.default_rng(0)
    seen, least = 0, []
    for _ in range(300):
        drawn = rng.choice(3, 1000, p=(0.86, 0.09, 0.05))
        base, model = (drawn == 2).astype(float), (drawn == 1).astype(float)
        least.append(detectable(base, model))
        seen += p_value(base, model) < LEVEL
    power = stats.norm.cdf(0.04 / (np.median(least) / 2.802) - 1.96)  # of 4 points, from what is detectable
    assert seen / 300 == pytest.approx(power, abs=0.07)
