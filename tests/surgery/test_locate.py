"""Locate against the slow way: one model per variant, and a finite difference for the attribution."""

import copy
import json
import warnings

import numpy as np
import pytest
import torch

from surgery.errors import UserError
from surgery.evaluation import views
from surgery.figures.mixing_figure import draw_mixing
from surgery.loading.opened import Checkpoint
from surgery.locating import walk
from surgery.locating.attribution import STARTS, attribute_starts, best_starts
from surgery.locating.exact import Exact
from surgery.locating.locate import locate
from surgery.locating.planning import plan, random_plan
from surgery.locating.questions import QuestionSet, reference_batch
from surgery.locating.ranking import Ranking, Score
from surgery.locating.replay import Replay
from surgery.locating.roles import masses, role
from surgery.locating.search import LEADING
from surgery.locating.subject import Subject
from surgery.models.anatomy import anatomy
from surgery.probes.encoded import encode, padded
from surgery.probes.kv import KVRetrieval
from surgery.probes.scoring import batches
from surgery.records.plan import Plan, Start
from surgery.records.recipe import Data
from surgery.records.site import Site
from surgery.runtime.quiet import hush_transformers
from surgery.splicing.splice import adopt, splice
from surgery.statistics import Estimate, mean, means
from tests.models import SAME, VARIANTS, VOCABULARY, but_slow, float64, random_base, subject
from tests.surgery.test_anatomy import build
from tests.surgery.test_replay import untouched

FEW = {"data": Data(skills=()), "options": {"pairs": 4}}  # test_skills.py measures skills


@pytest.fixture(scope="module")
def world_base(tokenizer):
    return random_base(vocab_size=VOCABULARY, n_groups=2)


@pytest.mark.usefixtures("in_float64")
# Of the others, "plain" is all in "untied", and "groups" in "dt limit".
@pytest.mark.parametrize(
    "name", but_slow(["group per two heads, biases", "no conv bias", "dt limit", "untied"], "group per two heads, biases")
)
def test_every_variant_equals_a_model_of_its_own(name, tokens):
    base = random_base(**VARIANTS[name], num_hidden_layers=2)
    last = torch.tensor([36, 20])
    at = torch.arange(2), last
    seen = set()
    starts = {"L0.H1": Start(sign=-1, tau=0.5), "L1.H6": Start(tau=2.0), "L1.H2": Start(sign=-1)}
    adopted = subject(adopt(base))
    for variant in walk.variants(Replay(adopted, tokens, last), walk.fully_gated(adopted, starts)):
        seen.add((variant.kind, str(variant.site)))
        if variant.site and variant.site.heads and variant.site.heads[0] not in (0, 1, 2, 6):
            continue  # heads like those, of the same groups
        if variant.kind == "base":
            model = adopt(base)
        elif variant.kind == "splice":
            heads = variant.site.heads or tuple(range(8))
            site = Site(variant.site.layer, heads)
            own = {str(head): starts[str(head)] for head in site.each() if str(head) in starts}
            model = splice(base, Plan(sites=(site,), starts=own, shared=True))
        else:  # ablated: the columns of out_proj that read the head are zero, or the whole mixer is
            model = adopt(copy.deepcopy(base))
            projection = model.backbone.layers[variant.site.layer].mixer.out_proj
            with torch.no_grad():
                for head in variant.site.heads:
                    projection.weight[:, head * 16 : (head + 1) * 16] = 0
                if not variant.site.heads:
                    projection.weight.zero_()
                    if projection.bias is not None:
                        projection.bias.zero_()
        with torch.inference_mode():
            torch.testing.assert_close(variant.logits, model(tokens).logits[at], **SAME)
    assert len(seen) == 1 + 2 * 2 * 9


@pytest.mark.usefixtures("in_float64")
def test_attribution_is_the_derivative_of_the_loss(world_base, tokenizer):
    """By a central difference in float64, for heads of both groups in every layer, and every example."""
    base = random_base(vocab_size=world_base.config.vocab_size, n_groups=2).double()
    gated = walk.fully_gated(subject(base))
    encoded = encode(tokenizer, KVRetrieval(4).questions(3, seed=0))
    ids, last = padded(encoded.rows, torch.device("cpu"))

    def losses() -> torch.Tensor:
        with torch.no_grad():
            return encoded.losses(gated.model(ids).logits[torch.arange(3), last].double())

    estimated = attribute_starts(gated, encoded, [None])[0]
    for layer, block in enumerate(gated.model.backbone.layers):
        for head in (1, 6):
            gate = block.mixer.graft.gate.data
            values = []
            for step in (1e-4, -1e-4):
                gate[head] = step
                values.append(losses())
            gate[head] = 0
            slope = (values[1] - values[0]) / 2e-4  # minus the derivative, but for the square of the step
            np.testing.assert_allclose(estimated[:, layer, head], slope, atol=1e-7, rtol=1e-5)


def test_ranking_is_seeded_and_sorted(world_base, tokenizer, tmp_path):
    one, two = (locate(world_base, tokenizer, **FEW, examples=6, batch_size=b, seed=3) for b in (4, 6))
    assert [s.site for s in one.heads] == [s.site for s in two.heads]
    gains = [s.splice_loss.value for s in one.heads]
    assert gains == sorted(gains, reverse=True)
    assert {s.site for s in one.heads} == {Site(layer, (head,)) for layer in range(3) for head in range(8)}
    for score in one.heads:
        low, high = score.splice_loss.ci95
        assert low <= score.splice_loss.value <= high
    one.write(tmp_path / "ranking.json")
    assert Ranking.read(tmp_path / "ranking.json") == one
    written = json.loads((tmp_path / "ranking.json").read_text())
    assert written["provenance"]["schema_version"] == 1
    assert len(written["provenance"]["base_fingerprint"]) == 64


def test_attribution_alone_ranks_without_exact_scores(world_base, tokenizer):
    ranking = locate(world_base, tokenizer, **FEW, examples=8, exact=False)
    assert ranking.heads[0].splice_loss is None
    values = [s.attribution.value for s in ranking.heads]
    assert values == sorted(values, reverse=True)
    assert plan(ranking, heads=2).sites


def test_locating_leaves_the_base_alone(world_base, tokenizer):
    before = {name: (p.clone(), p.requires_grad) for name, p in world_base.named_parameters()}
    locate(world_base, tokenizer, **FEW, examples=4)
    for name, p in world_base.named_parameters():
        assert torch.equal(p, before[name][0])
        assert p.requires_grad == before[name][1]
        assert p.grad is None


def test_masses_are_shares(world_base, tokenizer):
    answer, pair = masses(Subject.of(world_base, tokenizer), KVRetrieval(4).questions(2, seed=0))
    for share in (answer, pair):
        assert share.shape == (2, 3, 8)
        assert (share >= 0).all()
        assert (share <= 1 + 1e-5).all()


@pytest.mark.usefixtures("in_float64")
def test_the_start_of_a_head_is_the_one_with_the_largest_attribution(world_base, tokenizer):
    encoded = encode(tokenizer, KVRetrieval(4).questions(6, seed=0))
    base = Subject.of(copy.deepcopy(world_base).double(), tokenizer)
    ungated = walk.fully_gated(base)
    together = attribute_starts(ungated, encoded)
    starts = best_starts(together.sum(1))
    assert len(starts) == 24
    by_start = []
    for start, one in zip(STARTS, together, strict=True):
        alone = attribute_starts(walk.fully_gated(base, dict.fromkeys(starts, start)), encoded, [None])[0]
        by_start.append(alone.mean(0))
        torch.testing.assert_close(one, alone, **SAME)
    assert not any("blend" in m.__dict__ or "attend" in m.__dict__ for m in ungated.model.modules())
    best = torch.stack(by_start).argmax(0)
    assert {key: STARTS[best[Site.parse(key).layer, Site.parse(key).heads[0]]] for key in starts} == starts
    assert len(set(map(str, starts.values()))) > 1


def test_plan_and_its_random_control(world_base, tokenizer):
    ranking = locate(world_base, tokenizer, **FEW, examples=4)
    chosen = plan(ranking, heads=3)
    assert {head for site in chosen.sites for head in site.each()} == {score.site for score in ranking.heads[:3]}
    assert chosen.starts == {str(score.site): score.start for score in ranking.heads[:3]}
    chosen = plan(ranking, sites=(Site(1, (0, 3, 6)),))
    taken = {head for site in chosen.sites for head in site.each()}
    control = random_plan(ranking, chosen, seed=0)
    drawn = {head for site in control.sites for head in site.each()}
    assert len(drawn) == 3
    assert not {head.layer for head in drawn} & {head.layer for head in taken}
    assert control.starts == {str(score.site): score.start for score in ranking.heads if score.site in drawn}
    assert control == random_plan(ranking, chosen, seed=0)
    assert {random_plan(ranking, chosen, seed=s).sites for s in range(5)} != {control.sites}
    beside = random_plan(ranking, chosen, seed=0, same_layers=True)
    (site,) = beside.sites
    assert (site.layer, len(site.heads)) == (1, 3)
    assert not set(site.heads) & {0, 3, 6}


def test_impossible_requests_are_refused(world_base, tokenizer):
    ranking = locate(world_base, tokenizer, **FEW, examples=4, exact=False)
    with pytest.raises(UserError, match="holds 24 heads; cannot plan 25"):
        plan(ranking, heads=25)
    with pytest.raises(UserError, match="locate: examples: Input should be greater than or equal to 2"):
        locate(world_base, tokenizer, examples=1)
    with pytest.raises(UserError, match="a llama model can only be ablated, so there is no attribution"):
        locate(build("llama"), tokenizer, exact=False)
    with pytest.raises(UserError, match="can only be ablated"):
        locate(splice(world_base, Plan(sites=("L0.H0",))), tokenizer, exact=False)
    most = plan(ranking, sites=(Site(1, tuple(range(5))),))
    assert random_plan(ranking, most, seed=0, same_layers=True) is None  # five heads, and three are left
    assert random_plan(ranking, plan(ranking, heads=20), seed=0) is None


def test_a_hybrid_is_ranked_by_ablation(world_base, tokenizer):
    """With attention layers of its own, heads of the others are spliced, too; with grafted heads, none."""
    layers = splice(world_base, Plan(kind="layer", sites=("L1",)))
    ranking = locate(layers, tokenizer, options={"pairs": 4}, examples=4)
    kinds = {score.site.layer: score.kind for score in ranking.heads}
    assert kinds == {0: "ssm", 1: "attention", 2: "ssm"}
    assert all(score.ablation_loss is not None for score in ranking.heads)
    assert {score.site.layer for score in ranking.heads if score.splice_gain is not None} == {0, 2}
    assert {site.layer for site in plan(ranking, 16).sites} == {0, 2}
    hybrid = splice(world_base, Plan(sites=("L1.H0",)))
    ranking = locate(hybrid, tokenizer, options={"pairs": 4}, examples=4)
    assert all(score.ablation_loss is not None and score.splice_gain is None for score in ranking.heads)
    with pytest.raises(UserError, match="of a model that cannot be spliced"):
        plan(ranking)


def estimate(low):
    return Estimate(value=low + 0.1, ci95=(low, low + 0.2), n=32)


@pytest.mark.parametrize(
    ("cost", "answer", "pair", "gain", "expected"),
    [
        (0.1, 0.5, 0.1, 0.1, "aggregate"),
        (-0.1, 0.5, 0.1, 0.1, None),  # L0.H4 of the demo: splicing gains, ablating helps; others stand in for it
        (0.1, 0.2, 0.1, 0.1, None),  # looks everywhere
        (0.1, 0.5, 0.1, -0.1, None),
        (0.1, 0.2, 0.9, -0.1, "gather"),
        (-0.1, 0.2, 0.9, -0.1, None),
        (0.1, 0.2, 0.9, 0.001, None),  # a gain that its own interval shows, and the corrected one does not: neither
        (0.1, 0.5, 0.9, 0.001, None),
        (0.1, 0.5, 0.9, None, "aggregate"),  # nothing can be spliced
        (0.1, 0.2, 0.9, None, "gather"),
        (np.nan, 0.5, 0.9, 0.1, None),  # not ablated
        (0.1, np.nan, np.nan, 0.1, None),  # of a matrix that cannot be had
    ],
)
def test_a_head_has_a_role_if_it_is_missed(cost, answer, pair, gain, expected):
    """chance .25, the typical head's pair mass .4; the corrected ends lie .01 below the heads' own."""
    low = {
        "ablation_loss": cost,
        "answer_mass": answer,
        "pair_mass": pair,
        "splice_gain": np.nan if gain is None else gain - 0.01,
    }
    score = Score(
        site=Site(0, (4,)),
        ablation_loss=None if np.isnan(cost) else estimate(cost),
        splice_gain=None if gain is None else estimate(gain),
    )
    assert role(score, low, 0.25, 0.4) == expected
    if score.ablation_loss is not None:  # it costs, but not beyond chance, corrected for the number of heads
        assert role(score, low | {"ablation_loss": -0.001}, 0.25, 0.4) is None
    next_to_nothing = Estimate(value=2e-5, ci95=(1e-5, 3e-5), n=32)
    assert role(score.model_copy(update={"ablation_loss": next_to_nothing}), low, 0.25, 0.4) is None


def test_roles_stand_on_intervals_that_are_corrected_for_the_number_of_heads(world_base, tokenizer, monkeypatch):
    """A head's own interval, as it is shown, is shorter than that on which its role stands."""
    lows = []
    monkeypatch.setitem(role.__globals__, "role", lambda score, low, *_: lows.append((score, low)))
    locate(world_base, tokenizer, **FEW, examples=12, layers=False)
    assert len(lows) == 24
    for score, low in lows:
        for field in ("ablation_loss", "splice_gain"):
            own = getattr(score, field)
            assert low[field] < own.ci95[0] < own.value
        assert low["answer_mass"] < score.answer_mass.ci95[0]


def test_many_means_equal_single_ones():
    values = np.random.default_rng(0).normal(size=(20, 5))
    values[:, 3], values[4, 4] = 0.5, np.nan
    found = means(values)
    for column, estimate in zip(values.T[:4], found[:4], strict=True):
        single = mean(column)
        np.testing.assert_allclose([estimate.value, *estimate.ci95], [single.value, *single.ci95], rtol=1e-9, atol=1e-12)
    fewer = mean(np.delete(values[:, 4], 4))
    assert found[4].n == fewer.n == 19
    np.testing.assert_allclose([found[4].value, *found[4].ci95], [fewer.value, *fewer.ci95], rtol=1e-12)
    values[:, 4] = np.nan
    assert means(values)[4] is None
    assert means(values[:1, :1])[0] == mean(values[:1, 0])


@pytest.mark.usefixtures("in_float64")
def test_only_the_leading_heads_are_confirmed(world_base, tokenizer):
    world_base = copy.deepcopy(world_base).double()
    every = locate(world_base, tokenizer, **FEW, examples=4)
    some = locate(world_base, tokenizer, **FEW, examples=4, exact=0.2)
    by_attribution = sorted(every.heads, key=lambda s: -s.attribution.value)
    leading = {score.site for score in by_attribution[:5]}  # a fifth of 24
    assert not leading & set(some.drawn)
    assert {score.site for score in some.heads if score.splice_loss} == leading | set(some.drawn)
    exactly = {score.site: score for score in every.heads}
    for score in some.heads:
        assert score.kind == "ssm"
        assert score.attribution == exactly[score.site].attribution
        if score.splice_loss:
            np.testing.assert_allclose(score.splice_loss.value, exactly[score.site].splice_loss.value, **SAME)
    assert sum(score.ablation_loss is not None for score in some.heads) == LEADING
    measured = [score.splice_loss.value for score in some.heads if score.splice_loss]
    assert measured == sorted(measured, reverse=True)
    assert all(score.splice_loss for score in some.heads[: len(measured)])
    np.testing.assert_allclose(*([s.splice_loss.value for s in one.layers] for one in (some, every)), **SAME)
    without = locate(world_base, tokenizer, **FEW, examples=4, exact=0.1, layers=False)
    assert all(score.splice_loss is None and score.attribution for score in without.layers)


@pytest.mark.parametrize("name", ["llama", "recurrent_gemma"])
def test_models_without_grafts_are_analysed(name, tokenizer, tmp_path, painted):
    model = build(name, vocab_size=VOCABULARY)
    found = anatomy(model)
    ranking = locate(model, tokenizer, options={"pairs": 4}, examples=6)
    assert {score.site for score in ranking.heads} == set(found.sites())
    assert [score.site.layer for score in ranking.layers] == found.layers()
    losses = [score.ablation_loss.value for score in ranking.heads]
    assert losses == sorted(losses, reverse=True)
    for score in ranking.heads:
        mixer = found.mixer_of(score.site)
        assert score.kind == mixer.kind
        assert score.splice_loss is score.splice_gain is score.attribution is score.start is None
        known = not (name == "recurrent_gemma" and mixer.kind == "ssm")
        assert (score.answer_mass is not None) == (score.pair_mass is not None) == known
    with pytest.raises(UserError, match="a model that cannot be spliced"):
        plan(ranking)
    if name == "llama":  # the other draws no differently
        views.located(Checkpoint("llama", model, tokenizer, "f"), ranking, tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"atlas.png", "mixing.png"}
    assert untouched(model)


def test_the_heads_of_the_leading_layers_are_confirmed_where_nothing_can_be_spliced(tokenizer):
    model = build("llama", vocab_size=VOCABULARY)
    ranking = locate(model, tokenizer, options={"pairs": 4}, examples=4, exact=0.3)
    costly = max(ranking.layers, key=lambda s: s.ablation_loss.value).site.layer
    measured = {score.site for score in ranking.heads if score.ablation_loss}
    assert {site for site in measured if site.layer == costly} == {Site(costly, (head,)) for head in range(4)}
    assert len(measured) == 4 + 8  # the drawn ones are all the others


@pytest.mark.parametrize("how", ["mean", pytest.param("resample", marks=pytest.mark.slow)])
def test_what_comes_instead_of_a_head_is_the_same_however_batches_are_cut(how, world_base, tokenizer):
    base = Subject.of(copy.deepcopy(world_base).double(), tokenizer)
    found, questions, costs = base.anatomy, KVRetrieval(4).questions(7, 0), []
    reference = reference_batch(tokenizer, KVRetrieval(4).questions(3, 1), torch.device("cpu"))
    with float64():
        for size, what in ((2, how), (7, how), (7, "zero")):
            groups = list(batches(tokenizer, questions, size))
            exact = Exact(base, QuestionSet("kv", {}, 0, questions, groups, reference), ablation=what)
            exact.measure(None, layers=True)
            costs.append(exact.effects(found.sites() + [Site(layer) for layer in range(3)])["ablation_loss"])
    np.testing.assert_allclose(costs[0], costs[1], **SAME)
    assert np.abs(costs[0] - costs[2]).max() > 1e-4
    assert locate(world_base, tokenizer, **FEW, examples=2, ablation=how, exact=0.1).probe["ablation"] == how


@pytest.mark.parametrize(
    ("probe", "options", "spans"),
    [
        ("mqar", {"pairs": 4, "queries": 2}, 4), ("knowledge", {}, 0), ("needle", {"length": 40}, 1),
    ],
)  # fmt: skip
def test_any_probe_of_questions_can_be_asked(probe, options, spans, world_base, tokenizer, tmp_path):
    ranking = locate(world_base, tokenizer, probe=probe, options=options, examples=3, exact=0.1, layers=False)
    assert ranking.probe["name"] == probe
    assert ranking.probe["options"].items() >= options.items()
    assert ranking.probe["examples"] == 3
    leader = ranking.heads[0]
    assert leader.splice_loss.n == 3
    assert (leader.answer_mass is not None) == (spans > 1)
    assert (leader.pair_mass is not None) == (spans > 0)
    if not spans:
        assert {head.role for head in ranking.heads} == {None}
    if probe in ("mqar", "knowledge"):  # lines that can be fewer, and none
        draw_mixing(world_base, tokenizer, ranking, tmp_path / "mixing.png", top=1)
        assert (tmp_path / "mixing.png").exists() == (spans > 0)


def test_a_probe_with_few_questions_asks_them_all(world_base, tokenizer, tmp_path):
    facts = tmp_path / "facts.jsonl"
    facts.write_text(
        "".join(f'{{"prompt": "{w} is", "answer": " a", "choices": [" a", " b"]}}\n' for w in ("sun", "map", "key"))
    )
    ranking = locate(world_base, tokenizer, probe="knowledge", options={"source": str(facts)}, examples=9, exact=False)
    assert ranking.probe["examples"] == ranking.heads[0].attribution.n == 3


@pytest.mark.usefixtures("in_float64")
def test_hopeless_heads_are_given_up_and_the_leading_ones_are_not(tiny):
    base = Subject.of(copy.deepcopy(tiny.model).double(), tiny.tokenizer)
    questions = KVRetrieval(8).questions(32, 0)
    found, groups = base.anatomy, list(batches(tiny.tokenizer, questions, 8))
    whole, some = (Exact(base, QuestionSet("kv", {}, 0, questions, groups)) for _ in range(2))
    whole.measure(None, layers=False, kinds=("ablate",))
    some.measure(None, layers=False, kinds=("ablate",), leading=3)
    wanted, got = (exact.effects(found.sites())["ablation_loss"] for exact in (whole, some))
    asked = (~np.isnan(got)).sum(0)
    assert asked.min() == 16
    assert (asked == 32).sum() < 10
    assert (asked[wanted.mean(0).argsort()[-3:]] == 32).all()
    np.testing.assert_allclose(got[~np.isnan(got)], wanted[~np.isnan(got)], **SAME)


def test_sizes_of_zero_are_refused_without_torchs_warnings():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        hush_transformers()
        torch.nn.Linear(0, 3)
        warnings.warn("something else", stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["something else"]
