"""The learning rate, and when a curve is flat."""

import itertools
from typing import Any

import numpy as np
import pytest

from surgery.tuning.stopping import EVAL_STEPS, Watcher
from tests.surgery.tuning.small import few_steps


def test_the_rate_rises_and_falls_and_is_never_zero() -> None:
    watcher = Watcher(few_steps(steps=100, warmup_steps=10), lambda: np.zeros(1), {})
    shares = [watcher.share(step) for step in range(100)]
    assert shares[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert all(a >= b for a, b in itertools.pairwise(shares[9:]))
    assert shares[10] == 1
    assert 0 < shares[-1] < 0.001
    assert watcher.end == 100


def curve(*means: float, noise: float = 0.01, batches: int = 16) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    fixed = rng.normal(size=batches)
    return [mean * (1 + 0.1 * fixed) + noise * rng.normal(size=batches) for mean in means]


def run_watcher(losses: list[np.ndarray], most: int = 1000, steps: range = range(1000), **state: Any) -> Watcher:
    given = iter(losses)
    watcher = Watcher(few_steps(steps="auto", max_steps=most), lambda: next(given), {})
    watcher.restore(watcher.state() | state)
    for step in steps:
        if step >= watcher.end:
            break
        watcher.look(step)
    return watcher


def test_a_flat_curve_ends_the_steps() -> None:
    watcher = run_watcher(curve(3, 2, 1, 0.5, 0.5, 0.5, 0.5, 3))
    assert watcher.flat == 5 * EVAL_STEPS
    assert watcher.end == round(5 * EVAL_STEPS / 0.75)
    assert "back" not in watcher.ending()
    assert "back to step 75" in watcher.ending()  # the loss of 3 comes after the last step
    assert watcher.share(watcher.flat - 1) == 1
    assert watcher.share(watcher.end - 1) < 0.01


def test_a_curve_that_still_falls_is_cut_short() -> None:
    watcher = run_watcher(curve(*np.geomspace(3, 0.3, 30)), most=400)
    assert (watcher.flat, watcher.end) == (300, 400)
    assert "still fell" in watcher.ending()


def test_chance_is_no_progress() -> None:
    watcher = run_watcher(curve(1, *[0.97] * 5, noise=0.3))
    assert watcher.flat == 2 * EVAL_STEPS


def test_a_restored_watcher_goes_on_alike() -> None:
    losses = curve(3, 2, 1, 1, 1, 1)
    whole = run_watcher(losses)
    first = run_watcher(losses[:3], steps=range(60))
    second = run_watcher(losses[3:], steps=range(60, 1000), **first.state())
    assert (second.flat, second.end) == (whole.flat, whole.end)
