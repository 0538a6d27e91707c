"""Rankings of half a million channels: arrays in a file of their own, and everything that reads a ranking works on them."""

import json

import numpy as np
import pytest

from surgery.errors import UserError
from surgery.figures.atlas_page import LEADERS, MOST, atlas
from surgery.jobs.locating_stage import RANKING
from surgery.locating import heads_file, ranked_heads
from surgery.locating.heads import KINDS, SCORES, Heads, Score, gain
from surgery.locating.locate import locate
from surgery.locating.planning import plan, random_plan
from surgery.locating.ranked_heads import LISTED
from surgery.locating.ranking import Ranking
from surgery.records.plan import Start
from surgery.records.recipe import Data
from surgery.records.record import provenance
from surgery.records.site import Site
from surgery.statistics import Estimate, Intervals, intervals, mean, proportion
from surgery.world.tokenizer import build_tokenizer
from tests.models import VOCABULARY, random_base

LAYERS, CHANNELS = 64, 8192


def made(heads):
    zero, probe = mean(np.zeros(3)), {"name": "kv", "options": {"pairs": 4}, "seed": 3, "examples": 3}
    return Ranking(provenance=provenance("x", "f" * 64, 0, {}), probe=probe, base_accuracy=proportion(np.ones(3)),
                   base_loss=zero, heads=heads,
                   layers=(Score(site=Site(0)),))  # fmt: skip


def some_scores(count, seed=0):
    """Scores of which each has another few, in no order."""
    rng, scores = np.random.default_rng(seed), []
    for i in range(count):
        fields = {name: Estimate(value=rng.normal(), ci95=(rng.normal(), rng.normal()), n=int(rng.integers(1, 300)))
                  for name in SCORES if rng.random() < 0.4}  # fmt: skip
        start = Start(sign=int(rng.choice([-1, 1])), tau=float(rng.choice([0.25, 2.0]))) if rng.random() < 0.5 else None
        role = str(rng.choice(["gather", "aggregate"])) if rng.random() < 0.2 else None
        kind = KINDS[rng.integers(3)]
        scores.append(Score(site=Site(i % 5, (i // 5,)), start=start, role=role, kind=kind, **fields))
    rng.shuffle(scores)
    return scores


@pytest.fixture(scope="module")
def half_a_million():
    rng = np.random.default_rng(0)
    values = rng.standard_t(2.2, size=(4, LAYERS * CHANNELS)).astype(np.float32)
    values[:, [36 * CHANNELS + 1565, 12]] += 1e5
    count = LAYERS * CHANNELS
    few = rng.choice(count, 100, replace=False)
    loss = Intervals(*np.full((3, count), np.nan), np.zeros(count, dtype=int))
    for part, ends in zip(loss, intervals(values[:, few]), strict=True):
        part[few] = ends
    role = np.zeros(count, dtype=np.uint8)
    role[few[:3]] = (1, 2, 1)
    heads = Heads(
        layer=np.repeat(np.arange(LAYERS), CHANNELS), head=np.tile(np.arange(CHANNELS), LAYERS),
        kind=np.ones(count, dtype=np.uint8), role=role, sign=np.ones(count, dtype=np.int8), tau=np.full(count, 0.25),
        estimates={"attribution": intervals(values), "ablation_loss": loss},
    )  # fmt: skip
    return made(heads.sorted())


def same(first, second):
    for name in ("layer", "head", "kind", "role", "sign", "tau"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert set(first.estimates) == set(second.estimates)
    for name, estimates in first.estimates.items():
        for one, other in zip(estimates, second.estimates[name], strict=True):
            np.testing.assert_array_equal(one, other)


def test_arrays_say_what_scores_say():
    scores = some_scores(60)
    heads = Heads.of(scores)
    assert list(heads) == scores == [heads._score(i) for i in range(60)]
    fresh = heads.take(np.arange(60))  # made from arrays
    assert list(fresh) == scores
    assert fresh == heads
    assert fresh == tuple(scores)
    assert fresh != tuple(scores[1:])
    assert (fresh[3], fresh[-1], fresh[2:5]) == (scores[3], scores[-1], tuple(scores[2:5]))
    assert list(fresh.sorted()) == sorted(scores, key=gain, reverse=True)
    places = fresh.find([scores[7].site, Site(99, (0,)), Site(0), Site(4, (3, 5)), Site(0, (2**20,))])
    assert places == [7, None, None, None, None]
    for role in ("gather", "aggregate", None):
        chosen = [score for score in scores if (score.role if role is None else score.role == role)]
        chosen.sort(key=lambda score: score.ablation_loss.value if score.ablation_loss else 0.0, reverse=True)
        assert [fresh[int(i)] for i in fresh.with_role(role)] == chosen
    with pytest.raises(IndexError):
        fresh[60]
    with pytest.raises(ValueError, match=r"L1 is not one head"):
        Heads.of([Score(site=Site(1))])
    assert len(Heads.of([])) == 0


def test_a_file_of_arrays_holds_everything(tmp_path):
    for count in (1, 300):
        heads = Heads.of(some_scores(count))
        same(heads_file.read(heads_file.write(heads, tmp_path / "a.safetensors"), tmp_path), heads)


def test_few_heads_are_written_as_ever(tmp_path):
    ranking = made(some_scores(40))
    ranking.write(tmp_path / RANKING)
    assert [path.name for path in tmp_path.iterdir()] == [RANKING]
    content = json.loads((tmp_path / RANKING).read_text())
    assert "arrays" not in content
    assert content["heads"] == [score.model_dump(mode="json") for score in ranking.heads]
    assert Ranking.read(tmp_path / RANKING) == ranking


def test_each_ranking_has_arrays_of_its_own(tmp_path, monkeypatch):
    """Also where its name has a dot, and no ending."""
    monkeypatch.setattr(ranked_heads, "MANY", 10)
    first, second = made(some_scores(20)), made(some_scores(20, seed=1))
    for name, ranking in (("ranking-2.7b", first), ("ranking-2.8b", second), ("ranking.json", second)):
        ranking.write(tmp_path / name)
    assert Ranking.read(tmp_path / "ranking-2.7b") == first
    assert Ranking.read(tmp_path / "ranking-2.8b") == second
    assert len([*tmp_path.glob("ranking.*.safetensors")]) == 1


def test_half_a_million_are_made_written_and_read(half_a_million, tmp_path, monkeypatch):
    ranking = half_a_million
    built = []
    own = Score.__init__
    monkeypatch.setattr(Score, "__init__", lambda self, **fields: (built.append(1), own(self, **fields))[1])
    ranking.write(tmp_path / RANKING)
    again = Ranking.read(tmp_path / RANKING)
    same(again.heads, ranking.heads)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 30e6
    assert len(json.loads((tmp_path / RANKING).read_text())["heads"]) == LISTED
    assert {str(score.site) for score in again.top(2)} <= {"L36.H1565", "L0.H12"}
    assert again.score == "attribution"
    assert "524,288 heads" in str(again)
    assert len(again._repr_html_()) < 10_000
    chosen = plan(again, 48)
    assert chosen.sites[0].layer == 0
    assert set(chosen.starts.values()) == {Start(sign=1, tau=0.25)}
    taken = {head for site in chosen.sites for head in site.each()}
    for beside in (True, False):
        control = random_plan(again, chosen, 0, same_layers=beside)
        drawn = {head for site in control.sites for head in site.each()}
        assert len(drawn) == 48
        assert not drawn & taken
        assert ({site.layer for site in drawn} <= {site.layer for site in taken}) is beside
    with pytest.raises(UserError, match="layer 3 has 8192 heads, from 0"):
        plan(again, sites="L3.H8192")
    page = atlas(again, plan(again, 2000))
    assert LEADERS < len(page.heads) <= MOST + LEADERS + 24
    assert sum(len(map.png) for map in page.maps) < 100_000
    assert page.left_out == LAYERS * CHANNELS - len(page.heads)
    assert len(built) < 5000  # never half a million objects


def test_a_file_that_was_changed_or_lost_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ranked_heads, "MANY", 10)
    ranking = made(some_scores(30))
    path = tmp_path / RANKING
    ranking.write(path)
    (arrays,) = tmp_path.glob("*.safetensors")
    content = arrays.read_bytes()
    assert Ranking.read(path).heads == ranking.heads
    for changed in (content[:-1] + bytes([content[-1] ^ 1]), content[:-8], b""):
        arrays.write_bytes(changed)
        with pytest.raises(UserError, match=r"ranking\..*\.safetensors is not as it was written"):
            Ranking.read(path)
    arrays.unlink()
    with pytest.raises(UserError, match=r"cannot read the scores of a ranking in .*ranking\..*\.safetensors: No such file"):
        Ranking.read(path)
    arrays.write_bytes(content)
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 4'))
    with pytest.raises(UserError, match="does not fit its seal"):
        Ranking.read(path)


def test_until_both_files_are_written_the_earlier_ranking_stands(tmp_path, monkeypatch):
    """Each names its own arrays."""
    monkeypatch.setattr(ranked_heads, "MANY", 10)
    path = tmp_path / RANKING
    earlier = made(some_scores(30))
    earlier.write(path)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ranked_heads, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        made(some_scores(30, seed=1)).write(path)
    assert Ranking.read(path) == earlier


def test_a_search_says_the_same_whichever_way_it_is_written(tmp_path, monkeypatch):
    tokenizer = build_tokenizer()
    base = random_base(vocab_size=VOCABULARY)
    found = locate(base, tokenizer, options={"pairs": 4}, examples=4, exact=True, data=Data(skills=()))
    found.write(tmp_path / "all.json")
    monkeypatch.setattr(ranked_heads, "MANY", 3)
    monkeypatch.setattr(ranked_heads, "LISTED", 2)
    found.write(tmp_path / "leading.json")
    listed, arrays = (Ranking.read(tmp_path / name) for name in ("all.json", "leading.json"))
    assert listed == arrays == found
    assert listed.text() == arrays.text()
    assert (tmp_path / "leading.json").stat().st_size < (tmp_path / "all.json").stat().st_size / 3
