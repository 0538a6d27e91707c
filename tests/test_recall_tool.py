"""What tools/recall.py and tools/recall_places.py find in prose, by definition; and intervals over documents, by simulation."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from surgery.probes.hits import PairCounts, hits
from surgery.statistics import mean, over_documents
from tools.recall import ALL, seen_apart
from tools.recall_places import Losses

ROWS = arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.integers(0, 5))
SIMULATIONS = 2000
LEAST = 0.93  # of what is called 95%


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([0.0, 2e5]), st.integers(1, 9))
def test_what_is_recalled_without_a_bigram_is_no_hit(rows, rare, gap):
    counts = PairCounts([np.array([5, 0, 1, 1, 2, 2, 2])])
    allowed = rare * counts.tokens / 1e6
    wanted = [
        [
            i > 0
            and any(row[j] == row[i] for j in range(i - gap + 1))
            and [0, 1, 1, 2, 2, 2].count(row[i]) <= allowed
            and (row[i - 1], row[i]) not in list(pairwise(row[:i]))
            for i in range(len(row))
        ]
        for row in rows.tolist()
    ]
    found = seen_apart(rows, counts, rare, gap=gap)
    assert found.tolist() == wanted
    assert not (found & hits(rows, counts, 1e6, within=False, gap=1)).any()


@pytest.mark.parametrize("documents", [3, 6, 12])
def test_means_over_documents_are_covered_where_documents_and_rows_differ(documents):
    """Rows of a document go together, and so do stretches of a row. Stretches as units cover far less; and one more document
    lies where it is said to."""
    rng = np.random.default_rng(documents)
    covered_by, stretches, new = [], [], []
    for _ in range(SIMULATIONS // 2):
        of_document = rng.normal(0, 1, (documents + 1, 1, 1))
        values = of_document + rng.normal(0, 1, (documents + 1, 8, 1)) + rng.normal(0, 1, (documents + 1, 8, 4))
        found = over_documents(values[:-1].mean((1, 2)))
        low, high = found.mean.ci95
        covered_by.append(low <= 0 <= high)
        new.append(found.new[0] <= values[-1].mean() <= found.new[1])
        low, high = mean(values[:-1].ravel()).ci95
        stretches.append(low <= 0 <= high)
    assert np.mean(covered_by) >= LEAST
    assert np.mean(new) >= LEAST
    assert np.mean(stretches) < 0.7


@given(st.integers(2, 6), st.integers(0, 99))
def test_a_change_over_rows_is_that_of_the_means_over_tokens(rows, seed):
    rng = np.random.default_rng(seed)
    chosen = rng.random((rows, 9)) < 0.4
    chosen[0, 0] = True
    before, after = (Losses(rng.normal(size=(rows, 9)), {ALL: chosen}) for _ in range(2))
    assert after.change(before, ALL).value == pytest.approx(after.mean(ALL) - before.mean(ALL))
    assert after.change(after, ALL).ci95 == pytest.approx((0.0, 0.0))
