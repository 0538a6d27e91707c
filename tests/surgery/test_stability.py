"""How well rankings agree: on scores made up, against scipy, and from locate itself."""

import numpy as np
import pytest
from scipy import stats

from surgery.errors import UserError
from surgery.locating.attribution import attribute_starts
from surgery.locating.locate import locate
from surgery.locating.ranking import Ranking
from surgery.locating.search import DRAWN, LEADING
from surgery.locating.stability import HeadScores, ScoreColumn, stability
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated
from surgery.probes.encoded import encode
from surgery.probes.kv import KVRetrieval
from surgery.records.site import Site
from surgery.statistics import correlation
from tests.models import VOCABULARY, random_base

KV = {"name": "kv", "options": {"pairs": 4}}
SITES = [Site(0, (head,)) for head in range(12)]


def scores(centres, attributions=None, seed=0):
    """Six questions with the given means of every head."""
    noise = np.array([-1.0, 1.0, -2.0, 2.0, 0.5, -0.5])[:, None] * 0.01
    columns = {"splice_loss": ScoreColumn(np.asarray(centres, float) + noise)}
    if attributions is not None:
        columns["attribution"] = ScoreColumn(np.asarray(attributions, float) + noise)
    return HeadScores(KV, seed, np.array([1.0, 0, 1, 0, 1, 1]), columns, len(SITES))


def test_rankings_are_compared_as_scipy_does():
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=12), rng.normal(size=12)
    found = stability(SITES.__getitem__, [scores(one), scores(other, seed=1)], "splice_loss", [10, 11])
    (agreement,) = found.agreements
    assert agreement.correlation.value == pytest.approx(stats.spearmanr(one, other).statistic)
    low, high = agreement.correlation.ci95
    assert -1 <= low < agreement.correlation.value < high <= 1
    tops = [set((-centres).argsort()[:5]) for centres in (one, other)]
    assert agreement.shared[5] == len(tops[0] & tops[1])
    assert found.repeats[0].leading == tuple(SITES[i] for i in (-one).argsort()[:10])
    assert found.leading.value == pytest.approx(other[(-one).argsort()[:5]].mean())  # on the other's questions
    assert found.drawn.value == pytest.approx(other[10:].mean())
    assert found.repeats[0].missed is None  # nothing was attributed


def test_values_of_some_sites_say_the_same():
    """Half a million channels need not be kept for the few that are compared."""
    rng = np.random.default_rng(1)
    one, other = (scores(rng.normal(size=12), rng.normal(size=12), seed) for seed in (0, 1))
    chosen = [*one.leading("splice_loss", 5), 10, 11]
    some = other.only(np.array(chosen))
    assert some.columns["attribution"].values.shape[1] == len(set(chosen))
    # Measured at the chosen sites and at 3 others alone.
    at = np.unique([*chosen, 0, 1, 2])
    partly = HeadScores(KV, 1, other.correct, {"splice_loss": ScoreColumn(other.columns["splice_loss"].values[:, at], at)}, 12)
    assert np.isnan(partly.centres("splice_loss")).sum() == 12 - len(at)
    whole = stability(SITES.__getitem__, [one, other], "splice_loss", [10, 11])
    assert stability(SITES.__getitem__, [one, some], "splice_loss", [10, 11]) == whole
    compared = stability(
        SITES.__getitem__, [scores(one.centres("splice_loss")), partly.only(np.array(chosen))], "splice_loss", [10, 11]
    )
    assert (compared.leading, compared.drawn) == (whole.leading, whole.drawn)


def test_misses_of_the_prefilter():
    """The best head by exact measurement is the last but one by attribution."""
    exact = np.arange(12.0)[::-1]
    attributed = exact.copy()
    attributed[0] = 0.5
    found = stability(SITES.__getitem__, [scores(exact, attributed), scores(exact, exact)], "splice_loss", [])
    assert [repeat.missed for repeat in found.repeats] == [(SITES[0],), ()]
    assert "lack 1 of the 10 exact" in found.summary()
    header, rows = found.table()
    assert [row[2] for row in rows] == ["splice loss", "attribution"]
    assert {len(row) for row in rows} == {len(header)}
    assert found.drawn is None
    partly = scores(exact, attributed)
    partly.columns["splice_loss"].values[2:, 7] = np.nan  # given up after two questions
    partly.columns["splice_loss"].values[:, 8] = np.nan  # not measured
    found = stability(SITES.__getitem__, [partly, scores(exact, exact)], "splice_loss", [])
    assert found.repeats[0].missed is None
    assert found.agreements[0].correlation.n == 11
    assert found.agreements[0].correlation.value == pytest.approx(1)


def test_there_is_no_correlation_with_what_does_not_vary():
    assert correlation(np.ones(5), np.arange(5.0)) is None
    assert correlation(np.arange(2.0), np.arange(2.0)) is None
    ties = np.array([0, 0, 1, 1, 2, 2.0]), np.array([0, 1, 1, 0, 2, 3.0])
    assert correlation(*ties).value == pytest.approx(stats.spearmanr(*ties).statistic)


@pytest.fixture(scope="module")
def world_base(tokenizer):
    return random_base(vocab_size=VOCABULARY, num_hidden_layers=2)


def test_a_ranking_is_repeated_with_other_seeds_and_probes(world_base, tokenizer, tmp_path):
    common = {"options": {"pairs": 4}, "examples": 6, "layers": False, "exact": 0.5, "batch_size": 3}
    alone = locate(world_base, tokenizer, **common, seed=4)
    ranking = locate(
        world_base, tokenizer, **common, seed=4, seeds=2, also=[{"probe": "mqar", "options": {"pairs": 3, "queries": 2}}]
    )
    assert [head.model_dump() for head in ranking.heads] == [head.model_dump() for head in alone.heads]
    found = ranking.stability
    assert alone.stability is None
    assert [(r.probe["name"], r.seed) for r in found.repeats] == [("kv", 4), ("kv", 5), ("mqar", 4)]
    assert len(found.agreements) == 3 * 2  # pairs of rankings, scores
    measured = [head for head in ranking.heads if head.splice_loss]
    assert found.repeats[0].leading == tuple(head.site for head in measured[:LEADING])
    attributed = next(a for a in found.agreements if a.score == "attribution" and a.between == (0, 1))
    starts = {str(head.site): head.start for head in ranking.heads}  # the first one's grafts, on the other one's questions
    questions = encode(tokenizer, KVRetrieval(4, keys="lessons").questions(6, 5))
    again = attribute_starts(fully_gated(Subject.of(world_base, tokenizer), starts), questions, [None])[0].mean(0)
    both = [(head.attribution.value, float(again[head.site.layer, head.site.heads[0]])) for head in alone.heads]
    assert attributed.correlation.value == pytest.approx(stats.spearmanr(both).statistic, abs=0.02)  # rounding may swap two
    assert found.drawn.n == found.leading.n == 12
    assert len(ranking.drawn) == min(DRAWN, 8)
    ranking.write(tmp_path / "ranking.json")
    assert Ranking.read(tmp_path / "ranking.json") == ranking


def test_without_exact_measurements_attributions_are_compared(world_base, tokenizer):
    ranking = locate(world_base, tokenizer, options={"pairs": 4}, examples=4, exact=False, seeds=3)
    assert ranking.stability.score == "attribution"
    assert [a.between for a in ranking.stability.agreements] == [(0, 1), (0, 2), (1, 2)]
    assert ranking.drawn == ()
    assert ranking.stability.drawn is not None


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ({"probe": "copying", "options": {"length": 4}}, "asks for completions"),
        ({"probe": "needle", "options": {"length": 40, "tokenizer": "x"}}, "no option of that name"),
        ({"probe": "knowledge", "examples": 10**6, "ablation": "mean"}, "knowledge has no others"),
    ],
)
def test_probes_that_cannot_be_asked_are_refused(world_base, tokenizer, what, complaint):
    with pytest.raises(UserError, match=complaint):
        locate(world_base, tokenizer, **what)
