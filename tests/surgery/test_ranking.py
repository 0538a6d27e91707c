"""A ranking as a table and a data frame, and what the verbs around it say to arguments of other types."""

import builtins
import math
from html import unescape

import pytest

import surgery as package
from surgery.errors import UserError
from surgery.evaluation import bench as benching
from surgery.locating.locate import locate
from surgery.locating.ranking import COLUMNS
from surgery.records.recipe import Bench
from surgery.world.tokenizer import build_tokenizer
from tests.models import VOCABULARY, random_base
from tests.surgery.test_anatomy import build

FEW = {"options": {"pairs": 4}, "examples": 4}


@pytest.fixture(scope="module")
def base(tokenizer):
    return random_base(vocab_size=VOCABULARY, num_hidden_layers=2)


@pytest.fixture(scope="module")
def ranking(base, tokenizer):
    return locate(base, tokenizer, **FEW, exact=0.2, name="some/folder/base")


@pytest.fixture(scope="module")
def ablated(tokenizer):
    return locate(build("llama", vocab_size=VOCABULARY), tokenizer, **FEW, exact=0.3)


def test_a_ranking_reads_as_a_table(ranking, ablated):
    lines = str(ranking).splitlines()
    assert repr(ranking) == str(ranking)
    assert lines[0] == "Ranking of base: 16 heads, by splice loss"
    accuracy, (low, high) = ranking.base_accuracy.accuracy, ranking.base_accuracy.ci95
    assert lines[1].endswith(f"4 examples; base accuracy {accuracy:.3f} [{low:.3f}, {high:.3f}]")
    assert lines[2].split() == ["site", "role", "splice", "loss", "attribution", "also", "for"]
    first = ranking.heads[0]
    others = [f"{first.attribution.value:+.3f}", *", ".join(ranking.also_for(first.site)).split()]
    assert lines[3].split() == [str(first.site), *str(first.splice_loss).split(), *others]
    assert [line.split()[0] for line in lines[3:13]] == [str(score.site) for score in ranking.top()]
    assert lines[13].startswith("... and 6 more heads")
    assert all(len(line) <= 80 for line in lines)
    assert str(ablated).splitlines()[0] == "Ranking of base: 12 heads, by ablation loss"
    assert "attribution" not in str(ablated)


def test_a_notebook_shows_the_same(ranking):
    page = ranking._repr_html_()
    _, body = ranking.table()
    assert page.count("<tr>") == 1 + len(body)
    cells = unescape(page.replace("</td>", "|"))
    assert all(f"{cell}|" in cells for row in body for cell in row)
    named = ranking.model_copy(update={"provenance": ranking.provenance.model_copy(update={"base": "<script>"})})
    assert "<script>" not in named._repr_html_()


def test_the_leading_heads(ranking):
    assert ranking.top(3) == ranking.heads[:3]
    assert ranking.top(99) == ranking.heads
    assert len(ranking.table(2)[1]) == 2
    with pytest.raises(UserError, match="from 1 on, not 0"):
        ranking.top(0)


def test_a_data_frame_holds_all_heads(ranking, ablated):
    frame = ranking.to_pandas()
    assert list(frame["site"]) == [str(score.site) for score in ranking.heads]
    assert frame["drawn"].sum() == len(ranking.drawn) > 0
    for score, row in zip(ranking.heads, frame.to_dict("records"), strict=True):
        assert (row["layer"], row["head"], row["sign"]) == (score.site.layer, score.site.heads[0], score.start.sign)
        for name in COLUMNS:
            estimate = getattr(score, name)
            if estimate is None:
                assert math.isnan(row[name])
                assert row[f"{name}_n"] == 0
            else:
                assert (row[name], (row[f"{name}_low"], row[f"{name}_high"])) == (estimate.value, estimate.ci95)
                assert row[f"{name}_n"] == estimate.n
    assert ablated.to_pandas()[["sign", "attribution", "splice_loss"]].isna().all().all()


def test_the_figure_has_a_map_for_each_score_that_was_measured(ranking, ablated, tmp_path, painted):
    for made, titles in ((ranking, {"Ablated: loss gained", "Spliced: loss saved"}), (ablated, {"Ablated: loss gained"})):
        figure = made.plot()
        drawn = {axis.get_title() or axis.get_title(loc="left") for axis in figure.axes if axis.images}
        assert titles <= drawn
        assert ("Spliced: loss saved" in drawn) == (made is ranking)
        assert figure._repr_png_().startswith(b"\x89PNG")
    figure.savefig(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_without_pandas_it_says_so(ranking, monkeypatch):
    own = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UserError, match="needs pandas, which is not installed: pip install pandas"):
        ranking.to_pandas()


def test_a_checkpoint_is_located_in_without_naming_its_tokenizer(tiny):
    whole = locate(tiny, **FEW, exact=False, seed=2)
    assert whole.provenance.base == "tiny-mamba2"
    for model in (tiny.model, package.adopt(tiny.model)):
        alone = locate(model, tiny.tokenizer, **FEW, exact=False, seed=2, name=tiny.name)
        assert alone.heads == whole.heads
        assert alone.conditions == whole.conditions
    assert locate(tiny.model, **FEW, exact=False, seed=2).heads == whole.heads  # surgery.load told it


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda b, r: package.locate("folder"), r"not its name; load it first: base = surgery.load\('folder'\)"),
        (lambda b, r: package.locate(b), "locate needs a tokenizer beside the model"),
        (lambda b, r: package.locate(b, "gpt2"), "takes a tokenizer as .* not a str"),
        (
            lambda b, r: package.locate(b, build_tokenizer(), exact=7),
            "locate: exact: Input should be less than or equal to 1",
        ),
        (lambda b, r: package.load(b), "load takes a Hub id or a folder, not a Mamba2ForCausalLM"),
        (lambda b, r: package.plan(b), "plan takes a Ranking, not a Mamba2ForCausalLM: surgery.locate makes one"),
        (lambda b, r: package.plan(r, heads="two"), "holds 16 heads; cannot plan two"),
    ],
)
def test_other_types_are_named_in_one_line(base, ranking, call, complaint):
    with pytest.raises(UserError, match=complaint) as refused:
        call(base, ranking)
    assert "\n" not in str(refused.value)


def test_bench_digests_the_tokenizer_once(base, tokenizer, monkeypatch):
    counted = []
    own = benching.tokenizer_digest
    monkeypatch.setattr(benching, "tokenizer_digest", lambda words: counted.append(words) or own(words))
    options = Bench(pairs=(2,), limit=2, windows=1, window=8, contexts=())
    reports = benching.measure({"base": base, "again": base}, tokenizer, options)
    assert len(counted) == 1
    assert {report.conditions.tokenizer for report in reports.values()} == {own(tokenizer)}


def test_a_ranking_without_heads_or_with_an_older_probe_still_reads(ranking):
    assert "0 heads" in str(ranking.model_copy(update={"heads": ()}))
    assert str(ranking.model_copy(update={"probe": {"name": "kv"}})).splitlines()[1].startswith("kv, ? examples")
