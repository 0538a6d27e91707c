"""Evidence: Holm's correction, what n can see, and how often two copies of one model would be called different."""

import numpy as np
import pytest
from scipy import stats

from surgery.statistics import evidence, holm


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.9, 0.8])) == pytest.approx([1, 1])


def test_p_values_are_those_of_the_named_tests():
    base = np.array([1.0] * 10 + [0.0] * 10)
    model = np.array([1.0] * 9 + [0.0] * 3 + [1.0] * 8)
    assert evidence({"kv": (base, model)})["kv"].p == stats.binomtest(1, 9).pvalue
    losses = np.linspace(1, 2, 20)
    noise = np.random.default_rng(0).normal(0.1, 0.1, 20)
    assert evidence({"loss": (losses, losses + noise)})["loss"].p == pytest.approx(
        stats.ttest_rel(losses, losses + noise).pvalue
    )


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


def test_copies_that_agree_everywhere():
    said = evidence({"kv": (np.ones(400), np.ones(400))})["kv"]
    assert (said.p, said.differs) == (1, False)
    assert 0 < said.detectable < 0.01
    assert evidence({"loss": (np.array([1.5]), np.array([1.6]))})["loss"].detectable is None
