"""The probe `hits`: all recall hits of rows of text at once, to locate and to plan by."""

import random

import numpy as np
import pytest
import torch

from surgery.choosing.bounded import Measuring
from surgery.choosing.task import ChoiceTask
from surgery.errors import UserError
from surgery.figures.example import example_tokens, short_question
from surgery.loading.opened import Checkpoint
from surgery.locating import walk
from surgery.locating.attribution import attribute_starts
from surgery.locating.attribution_memory import Step, parted
from surgery.locating.exact import Exact
from surgery.locating.locate import locate
from surgery.locating.planning import plan
from surgery.locating.questions import QuestionSet, question_set
from surgery.locating.subject import Subject
from surgery.locating.substitution import ablate_heads
from surgery.more.ways.choice import choose
from surgery.probes import make
from surgery.probes.encoded import EncodedPassages
from surgery.probes.hits import NONE, PairCounts, seen_before
from surgery.probes.kv import KVRetrieval
from surgery.probes.perplexity import token_losses
from surgery.probes.scoring import answer, batches
from surgery.records.plan import Plan
from surgery.records.recipe import Auto, Data, Lesson, Locate, PlanOptions, Text, Tune
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice
from surgery.studies.prune import Pruner
from surgery.tuning.batches import check, held_out_windows
from surgery.world.text import document
from tests.models import VOCABULARY, random_base

TOKENS = 48


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three text files of the small world, in which words come again and again."""
    folder = tmp_path_factory.mktemp("texts")
    for name, seed in (("one.txt", 1), ("two.txt", 2), ("three.txt", 3)):
        rng = random.Random(seed)
        (folder / name).write_text("\n\n".join(document(rng, held_out=False) for _ in range(40)))
    return folder


@pytest.fixture(scope="module")
def options(texts):
    return {"source": str(texts / "one.txt"), "tokens": TOKENS, "rare": 5000.0}


@pytest.fixture(scope="module")
def world_base():
    return random_base(vocab_size=VOCABULARY, n_groups=2)


@pytest.fixture(scope="module")
def passages(tokenizer, options):
    return make("hits", tokenizer=tokenizer, **options).passages(5, seed=0)


def ids_of(tokenizer, path):
    return np.array(tokenizer(path.read_text(), add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("sources", [["one.txt"], ["one.txt", "two.txt"]])
@pytest.mark.parametrize("elsewhere", [None, "three.txt"])
def test_the_rows_and_their_hits(tokenizer, texts, sources, elsewhere):
    """Of each text its own rows; pairs are rare in the text that is counted, or elsewhere in the source."""
    ids = [ids_of(tokenizer, texts / name) for name in sources]
    rows = np.concatenate([each[: len(each) // TOKENS * TOKENS].reshape(-1, TOKENS) for each in ids])
    counted = {None: ids, "three.txt": [ids_of(tokenizer, texts / "three.txt")],
               }[elsewhere]  # fmt: skip
    before = seen_before(rows, PairCounts(counted), 5000.0, within=elsewhere is None)
    source = [str(texts / name) for name in sources]
    found = make(
        "hits", tokenizer=tokenizer, source=source[0] if len(source) == 1 else source, tokens=TOKENS, rare=5000.0,
        elsewhere=None if elsewhere is None else str(texts / elsewhere),
    ).passages(10**6, seed=3)  # fmt: skip
    expected = {
        tuple(row.tolist()): tuple((i, b[i]) for i in np.flatnonzero(b != NONE)) for row, b in zip(rows, before, strict=True)
    }
    assert {passage.ids: passage.hits for passage in found} == {ids: hits for ids, hits in expected.items() if hits}
    assert len({passage.weight for passage in found}) == 1
    assert sum(len(passage.hits) * passage.weight for passage in found) == pytest.approx(len(found))


def test_rows_are_drawn_by_the_seed(tokenizer, options):
    probe = make("hits", tokenizer=tokenizer, **options)
    every = probe.passages(10**6, seed=0)
    assert probe.passages(3, seed=1) == make("hits", tokenizer=tokenizer, **options).passages(3, seed=1)
    assert probe.passages(3, seed=1) != probe.passages(3, seed=2)
    assert len({*every}) == len(every)


@pytest.mark.usefixtures("in_float64")
def test_the_loss_is_that_of_the_hits(world_base, tokenizer, passages):
    model = adopt(random_base(vocab_size=VOCABULARY, n_groups=2).double()).eval()
    asked = answer(model, tokenizer, passages, batch_size=2)
    for passage, loss, right in zip(passages, asked.loss, asked.correct, strict=True):
        ids = torch.tensor([passage.ids])
        losses = token_losses(model, ids)[0]
        places = [place for place, _ in passage.hits]
        assert loss == pytest.approx(passage.weight * sum(losses[place - 1].item() for place in places), rel=1e-5)
        with torch.no_grad():
            greedy = model(ids).logits[0].argmax(-1)
        assert right == pytest.approx(passage.weight * sum(greedy[place - 1] == passage.ids[place] for place in places))


def test_a_part_is_what_it_would_be_alone(passages):
    whole = EncodedPassages.of(passages)
    assert [part.seen() for part in parted(whole, 2)] == [
        EncodedPassages.of(passages[begin : begin + 2]).seen() for begin in range(0, len(passages), 2)
    ]


@pytest.mark.usefixtures("in_float64")
def test_attribution_is_the_derivative_of_the_loss_on_hits(tokenizer, passages):
    base = random_base(vocab_size=VOCABULARY, n_groups=2).double()
    gated = walk.fully_gated(Subject.of(base, tokenizer))
    encoded = EncodedPassages.of(passages)

    def losses():
        with torch.no_grad():
            return encoded.losses(gated.model(torch.tensor(encoded.rows)).logits[encoded.target_positions()].double())

    slopes = attribute_starts(gated, encoded, [None])[0]
    for step in (Step(None, checkpointed=True), Step(2)):
        np.testing.assert_allclose(attribute_starts(gated, encoded, [None], step)[0], slopes, rtol=1e-5, atol=1e-7)
    for layer, head in ((0, 1), (1, 6), (2, 3)):
        gate, values = gated.model.backbone.layers[layer].mixer.graft.gate.data, []
        for change in (1e-4, -1e-4):
            gate[head] = change
            values.append(losses())
        gate[head] = 0
        np.testing.assert_allclose(slopes[:, layer, head], (values[1] - values[0]) / 2e-4, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("init", ["dual", "induction"])
def test_what_is_measured_exactly_equals_models_of_their_own(init, tokenizer, passages):
    base = random_base(vocab_size=VOCABULARY, n_groups=2).double()
    subject = Subject.of(base, tokenizer)
    gated = walk.fully_gated(Subject(subject.model, tokenizer, subject.anatomy, init=init))
    measured = Exact(subject, QuestionSet("hits", {}, 0, passages, list(batches(tokenizer, passages, 2))), gated=gated)
    heads = [Site(0, (1,)), Site(1, (6,)), Site(2, (3,))]
    measured.measure(heads, layers=True)
    layers = [Site(layer) for layer in range(3)]
    effects = measured.effects([*heads, *layers])
    own = answer(subject.model, tokenizer, passages)
    for column, site in enumerate([*heads, *layers]):
        every = Site(site.layer, site.heads or tuple(range(8)))
        spliced = answer(splice(base, Plan(sites=(every,), shared=True, init=init)).eval(), tokenizer, passages)
        np.testing.assert_allclose(effects["splice_loss"][:, column], own.loss - spliced.loss, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(effects["splice_gain"][:, column], spliced.correct - own.correct, atol=1e-6)
        if site.heads:
            with ablate_heads(subject.anatomy, [site]):
                ablated = answer(subject.model, tokenizer, passages)
            np.testing.assert_allclose(effects["ablation_loss"][:, column], ablated.loss - own.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["mean", "resample"])
def test_other_rows_replace_a_head(how, world_base, tokenizer, options):
    asked = Locate(probe="hits", options=options, examples=6, ablation=how, batch_size=3)
    chosen = question_set(tokenizer, asked, asked, seed=0, device=torch.device("cpu"))
    assert {tuple(row) for row in chosen.reference[0].tolist()}.isdisjoint(passage.ids for passage in chosen.questions)
    subject, sites = Subject.of(world_base, tokenizer), [Site(0, (1,)), Site(2, (3,))]
    results = []
    for size in (3, 4):
        again = QuestionSet("hits", {}, 0, chosen.questions, list(batches(tokenizer, chosen.questions, size)), chosen.reference)
        measured = Exact(subject, again, ablation=how)
        measured.measure(sites, layers=False)
        results.append(measured.effects(sites)["ablation_loss"])
    np.testing.assert_allclose(*results, atol=2e-5)
    assert np.abs(results[0]).max() > 0


def test_heads_are_ranked_and_planned_by_hits(world_base, tokenizer, options):
    """Where a plan grows, on rows that no head was ranked by."""
    ranking = locate(world_base, tokenizer, probe="hits", options=options, examples=12, init="induction", exact=0.3)
    assert ranking.probe["options"]["tokens"] == TOKENS
    assert ranking.chance is None  # there is nothing to guess among
    assert ranking.heads[0].splice_loss.n == 12
    assert not any(score.role for score in ranking.heads)
    few = PlanOptions(heads="auto", auto=Auto(examples=4))
    fresh = ChoiceTask.of(world_base, ranking, few, tokenizer=tokenizer, seed=0).questions
    assert len(fresh) == 4
    assert {*fresh}.isdisjoint(make("hits", tokenizer=tokenizer, **options).passages(12, seed=0))
    chosen, subject = plan(ranking, 2, blend=0.3), Subject.of(world_base, tokenizer)
    text = held_out_windows(tokenizer, Data(), Tune(text_tokens=32), 2, 0)
    base, tried = Measuring(subject, fresh, text, batch_size=3).measure([None, chosen], "a plan")
    np.testing.assert_allclose(base.loss, answer(subject.model, tokenizer, fresh).loss, rtol=1e-4)
    np.testing.assert_allclose(tried.loss, answer(splice(world_base, chosen).eval(), tokenizer, fresh).loss, rtol=1e-4)


def test_the_figure_ends_before_a_hit(tokenizer, options):
    passage = short_question(tokenizer, "hits", options, 0)
    ids, labels, (span,), answer_at = example_tokens(tokenizer, passage)
    place, before = min(passage.hits, key=lambda hit: hit[0] - hit[1])
    assert answer_at == span
    assert [ids[i] for i in span] == [passage.ids[before - 1], passage.ids[before]]
    assert ids[-1] == passage.ids[place - 1] == ids[span[0]]  # the same token, behind which it looks
    assert len(labels) == len(ids)


def test_where_questions_are_needed_it_is_refused(world_base, tokenizer, options):
    with pytest.raises(UserError, match="asks for tokens of text"):
        Pruner(Subject.of(world_base, tokenizer), Locate(probe="hits", options=options, examples=4), KVRetrieval(4))
    lessons = Tune(steps=2, lessons=(Lesson(probe="hits", options=options),), text_batch_size=1)
    with pytest.raises(UserError, match=r"tune\.hit_weight"):
        check(tokenizer, lessons, Data(train_text=(Text(source="world"),)))
    ranking = locate(world_base, tokenizer, probe="hits", options=options, examples=4, exact=False)
    with pytest.raises(UserError, match="oracles need a probe"):
        choose(ChoiceTask.of(Checkpoint("base", world_base, tokenizer, "f" * 64), ranking, PlanOptions(by="choice")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 15}, "16 to 65,536 tokens, not 15"),
        ({"rare": -1.0}, "at least 0, not -1.0"),
        ({"source": []}, "a text file, or a list"),
        ({"elsewhere": "nowhere"}, "nowhere"),
        ({"elsewhere": "."}, "no .txt files"),
        ({"source": [""]}, "'' is no text"),
        ({"tokens": 10_000}, "tokens; a row of hits takes 10000"),
        ({"rare": 0.0, "tokens": 16}, "no rare pair of tokens comes again"),
    ],
)
def test_what_cannot_be_asked_is_refused(tokenizer, options, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        make("hits", tokenizer=tokenizer, **options | changes).passages(2, seed=0)


def test_a_text_is_not_counted_against_itself(tokenizer, texts, options):
    """Of a folder, its own file is left out; by itself it is refused. Nothing but white space cannot be counted in."""
    with pytest.raises(UserError, match="are one text; leave elsewhere out"):
        make("hits", tokenizer=tokenizer, **options, elsewhere=str(texts / "one.txt"))
    folder, other = (
        make("hits", tokenizer=tokenizer, **options, elsewhere=str(place)).passages(10**6, seed=0)
        for place in (texts, texts / "two.txt")
    )
    assert len({*folder}) > 0.9 * len({*other})  # of two files half as much is read of each
    (texts / "empty").mkdir()
    (texts / "empty" / "empty.txt").write_text("")
    with pytest.raises(UserError, match="holds no text in which pairs could be counted"):
        make("hits", tokenizer=tokenizer, **options, elsewhere=str(texts / "empty")).passages(2, seed=0)
