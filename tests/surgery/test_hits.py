"""Recall hits of text: which tokens they are, by the plain definition, and the suite that measures the loss on them."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from surgery.errors import UserError
from surgery.evaluation import markdown
from surgery.evaluation.bench import bench
from surgery.evaluation.judgement import judge
from surgery.evaluation.suites import tasks
from surgery.evaluation.suites.hits import hit_texts
from surgery.figures.views import results as report_figures
from surgery.probes.hits import NONE, PairCounts, hits, seen_before
from surgery.probes.perplexity import text_losses
from surgery.records.plan import Plan
from surgery.records.recipe import Bench, Data, Hints, Text, Tune, read_recipe
from surgery.splicing.splice import adopt, splice
from surgery.tuning import batches, plateau, rare_pairs
from surgery.tuning.batches import loaders
from surgery.tuning.distil import Distillation
from surgery.tuning.loop import tune
from surgery.tuning.rare_pairs import training_pairs
from surgery.tuning.sequences import IGNORE
from tests.models import VOCABULARY, random_base

TUNE = Tune(
    steps=3, batch_size=4, text_batch_size=3, text_tokens=160, lessons=(), hit_weight=1.0, kl_weight=2.0, warmup_steps=1,
    rare=1000.0,
)  # fmt: skip
ROWS = arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.integers(0, 5))


def by_definition(rows, text, rare, within, documents, gap):
    """Where the pair of each hit stood last before it, and NONE of other tokens, one token after the other."""
    pairs = [(first, second) for stretch in text for first, second in pairwise(stretch)]
    allowed = rare * sum(map(len, text)) / 1e6
    found = np.full(rows.shape, NONE)
    for r, row in enumerate(rows.tolist()):
        groups = documents[r].tolist()
        own = [(row[i - 1], row[i], groups[i]) if i and groups[i] == groups[i - 1] else None for i in range(len(row))]
        for i, pair in enumerate(own):
            before = [j for j in range(i) if own[j] == pair] if pair else []
            elsewhere = (
                pairs.count(pair[:2]) - (sum(p is not None and p[:2] == pair[:2] for p in own) if within else 0) if pair else 0
            )
            if before and i - before[-1] >= gap and elsewhere <= allowed:
                found[r, i] = before[-1]
    return found


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([0.0, 2e4, 1e5]), st.integers(1, 9), st.integers(1, 4), st.data())
def test_hits_are_those_of_the_definition(rows, rare, gap, parts, data):
    text = data.draw(st.lists(arrays(np.int64, st.integers(0, 30), elements=st.integers(0, 5)), max_size=3))
    documents = np.broadcast_to(np.arange(rows.shape[1]) * parts // rows.shape[1], rows.shape)
    for within, counted in ((False, text), (True, [*text, *rows])):
        expected = by_definition(rows, [list(map(int, part)) for part in counted], rare, within, np.zeros_like(rows), gap)
        assert (seen_before(rows, PairCounts(counted), rare, within=within, gap=gap) == expected).all()
        assert (hits(rows, PairCounts(counted), rare, within=within, gap=gap) == (expected != NONE)).all()
    apart = by_definition(rows, [list(map(int, part)) for part in text], rare, False, documents, gap)
    assert (seen_before(rows, PairCounts(text), rare, within=False, documents=documents, gap=gap) == apart).all()


def test_large_vocabularies_have_no_collisions():
    row = np.array([[2**31 - 1, 2**31 - 2, 1, *range(10, 20), 2**31 - 1, 2**31 - 2, 1]])
    assert np.flatnonzero(hits(row, PairCounts([]), 0.0, within=False)).tolist() == [14, 15]


@given(ROWS)
@settings(max_examples=40, deadline=None)
def test_a_hit_stays_one_in_a_longer_row_and_rarer_pairs_are_fewer(rows):
    counts = PairCounts([np.arange(6)])
    longer = np.concatenate((np.full((len(rows), 1), 7), rows), 1)
    short = hits(rows, counts, 1e6, within=False)
    assert (hits(longer, counts, 1e6, within=False)[:, 1:] >= short).all()
    assert (short >= hits(rows, counts, 0.0, within=False)).all()
    assert not short[:, :2].any()


@pytest.fixture(autouse=True)
def few_counted(monkeypatch):
    monkeypatch.setattr(rare_pairs, "TOKENS", 4000)


@pytest.fixture(scope="module")
def pair(tokenizer):
    base = random_base(vocab_size=VOCABULARY)
    return {"base": base, "hybrid": splice(base, Plan(sites=("L1.H2,5",)))}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = rng.choice([f"w{i}" for i in range(200)], 4000, p=(p := 1 / np.arange(1, 201)) / p.sum())
    path = tmp_path_factory.mktemp("text") / "held_out.txt"
    path.write_text(" ".join(words))
    return str(path)


@pytest.fixture(scope="module")
def options():
    return Bench(suites=("hits",), contexts=(32, 64), windows=6, window=24, rare=2000.0, batch_size=8)


def test_the_suite_measures_every_token_once(pair, tokenizer, text, options):
    data = Data(held_out_text=text)
    base, hybrid = pair["base"], pair["hybrid"]
    todo = {task.name: task for task in tasks(options, tokenizer, data, 0)}
    assert list(todo) == [f"{name}.{length}" for length in (32, 64) for name in ("recall_hits", "other_tokens")]
    chosen = hit_texts(options, tokenizer, data, 0)
    report = bench({"base": base, "hybrid": hybrid}, tokenizer=tokenizer, options=options, data=data)
    for length in (32, 64):
        both = [chosen[f"{name}.{length}"] for name in ("recall_hits", "other_tokens")]
        assert (sum(part.chosen.astype(int) for part in both) == 1)[:, 1:].all()
        assert not any(part.chosen[:, 0].any() for part in both)
        rows = both[0].rows.ids
        assert rows.shape == (144 // length, length)
        whole = text_losses(hybrid, rows, 1, 2).mean()
        tokens = [part.chosen.sum() for part in both]
        losses = [report["hybrid"].tasks[f"{name}.{length}"].value for name in ("recall_hits", "other_tokens")]
        assert np.average(losses, weights=tokens) == pytest.approx(whole, rel=1e-5)
        assert report["hybrid"].tasks[f"recall_hits.{length}"].n == len(rows) * -(-length // 24)
        change = report["hybrid"].change[f"recall_hits.{length}"].value
        assert change == pytest.approx(losses[0] - report["base"].tasks[f"recall_hits.{length}"].value)


def test_losses_are_shared_by_two_tasks_of_a_model_and_no_further(pair, tokenizer, text, options):
    chosen = hit_texts(options, tokenizer, Data(held_out_text=text), 0)
    first, second = chosen["recall_hits.32"], chosen["other_tokens.32"]
    calls = []
    handle = pair["base"].register_forward_pre_hook(lambda *_: calls.append(1))
    with handle:
        values, inputs = first.losses(pair["base"], 2)
        once = len(calls)
        _, same = second.losses(pair["base"], 2)
        assert (len(calls), same) == (once, inputs)
        assert (first.losses(pair["base"], 2)[0] == values).all()
        assert len(calls) == 2 * once  # the same task again is measured again
        first.losses(pair["hybrid"], 2)
        second.losses(pair["base"], 2)
        assert len(calls) == 3 * once  # and so is another model
    alone, _ = first.rows.losses(pair["base"], 5, None)
    assert values.mean() == pytest.approx(alone[first.chosen[:, 1:]].mean(), rel=1e-5)


def test_a_report_shows_and_judges_hits(pair, tokenizer, text, options, tmp_path, painted):
    report = bench(pair["base"], pair["hybrid"], tokenizer, options, data=Data(held_out_text=text))
    page = markdown.render(report)
    assert "## Loss on recall hits of held-out text, nats per token\n\n| tokens of a row | 32 | 64 |" in page
    assert "![Loss on recall hits](hits.png)" in page
    report_figures.draw(report, tmp_path)
    assert (tmp_path / "hits.png").stat().st_size > 5000
    (judgement,) = judge(report)
    assert "in rows of 64 tokens" in judgement.answer
    better = report["hybrid"].model_copy(
        update={
            "change": {
                task: each.model_copy(update={"value": -0.5, "ci95": (-0.6, -0.4)})
                for task, each in report["hybrid"].change.items()
            },
            "evidence": {task: each.model_copy(update={"differs": True}) for task, each in report["hybrid"].evidence.items()},
        }
    )
    models = {"base": report["base"], "hybrid": better}
    assert judge(report.model_copy(update={"models": models}))[0].verdict == "unclear", "there is no control"
    beaten = better.model_copy(update={"change": {task: each.model_copy(update={"value": 0.0, "ci95": (-0.1, 0.1)})
                                                  for task, each in better.change.items()}})  # fmt: skip
    assert judge(report.model_copy(update={"models": models | {"control_tuned": beaten}}))[0].verdict == "yes"
    control = better.model_copy(
        update={"change": {task: each.model_copy(update={"ci95": (-0.7, -0.5)}) for task, each in better.change.items()}}
    )
    (judgement,) = judge(report.model_copy(update={"models": models | {"control_tuned": control}}))
    assert judgement.verdict == "unclear"


def test_text_without_hits_or_too_short_is_refused(pair, tokenizer, text, options, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text(" ".join(f"w{i}" for i in range(60)))
    few = options.model_copy(update={"contexts": (16,), "rare": 0.0})
    with pytest.raises(UserError, match=r"bench, recall_hits.16: .* has no such tokens in rows of that length; take more text"):
        bench(pair["base"], tokenizer, few, data=Data(held_out_text=text))
    long = options.model_copy(update={"contexts": (2048,)})
    with pytest.raises(UserError, match=r"bench, hits: .* tokens, and a row needs 2048"):
        bench(pair["base"], tokenizer, long, data=Data(held_out_text=str(file)))


def test_rarity_is_counted_in_the_training_text_where_one_is_named(tokenizer, text, tmp_path):
    """Pairs that are frequent in the rest of the held-out text and never stand in the training text are rare by the latter."""
    train = tmp_path / "train.txt"
    train.write_text("? " * 30_000)
    named = Data(held_out_text=text, train_text=(Text(source=str(train)),))
    counts = training_pairs(tokenizer, named)
    assert 4000 <= counts.tokens < 4256
    options = Bench(suites=("hits",), contexts=(64,), windows=6, window=24, rare=0.0)
    by_rest, by_training = (hit_texts(options, tokenizer, data, 0) for data in (Data(held_out_text=text), named))
    assert by_rest["recall_hits.64"].chosen.sum() < by_training["recall_hits.64"].chosen.sum()


@pytest.fixture(scope="module")
def train_text(tmp_path_factory) -> Data:
    """Documents in which rare pairs come again, some of them in rows with others."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(80):
        words = [f"name{i} said{i}", *rng.choice(["the", "of", "and", "a", "so"], 12), f"name{i} said{i}"]
        lines.append(json.dumps({"text": " ".join(words)}))
    path = tmp_path_factory.mktemp("train") / "train.jsonl"
    path.write_text("\n".join(lines))
    return Data(train_text=(Text(source=str(path)),))


def batch(tokenizer, data, **changes):
    return next(zip(*loaders(tokenizer, TUNE.model_copy(update=changes), data, 0, 0), strict=True))


def test_batches_say_which_tokens_are_hits_of_their_own_document(tokenizer, train_text):
    (ids, targets), (text, real, places, before) = batch(tokenizer, train_text)
    is_hit = before != NONE
    assert ids.shape == targets.shape == (4, 1)
    assert (targets == IGNORE).all()
    assert is_hit.any()
    assert not (is_hit & ~real).any()
    pairs = training_pairs(tokenizer, train_text)
    for row, known, starts, found in zip(text, real, places, before, strict=True):
        begins = [*(starts == 0).nonzero()[:, 0].tolist(), len(row)]
        assert len(begins) > 2  # several documents share a row
        for first, end in pairwise(begins):
            alone = seen_before(row[None, first:end].numpy(), pairs, 1000.0, within=False)[0]
            assert (np.where(known[first:end].numpy(), alone, NONE) == found[first:end].numpy()).all()


def test_the_losses_are_those_of_the_definition(tokenizer, train_text):
    lesson, text = batch(tokenizer, train_text)
    base = random_base(vocab_size=VOCABULARY).double()
    teacher, student = adopt(base), splice(base, Plan(sites=("L1.H2,5",)))
    losses = Distillation(student, teacher, kl_weight=2.0, hit_weight=0.5)(*lesson, text)
    kl = entropy = 0.0
    ids, real, places, before = text
    is_hit = before != NONE
    for row in range(len(ids)):
        begins = [*(places[row] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
        for first, end in pairwise(begins):
            piece = ids[row : row + 1, first:end]
            ours, theirs = (model(piece).logits[0].log_softmax(-1) for model in (student, teacher))
            for i in range(end - first):
                if not real[row, first + i]:
                    continue
                if i + 1 < end - first and is_hit[row, first + i + 1]:
                    entropy -= ours[i, piece[0, i + 1]]
                else:
                    kl += (theirs[i].exp() * (theirs[i] - ours[i])).sum()
    assert losses["hits"].item() == pytest.approx(entropy.item() / is_hit.sum().item(), rel=1e-5)
    assert losses["kl"].item() == pytest.approx(kl.item() / real.sum().item(), rel=1e-4)
    assert losses["retrieval"] == 0
    assert losses["loss"].item() == pytest.approx(2 * losses["kl"].item() + 0.5 * losses["hits"].item())


def test_parts_of_a_batch_make_the_whole(tokenizer, train_text, monkeypatch):
    monkeypatch.setattr(plateau, "EVAL_STEPS", 2)
    monkeypatch.setattr(plateau, "EXAMPLES", 8)

    def log(parts: int):
        model = splice(random_base(vocab_size=VOCABULARY), Plan(sites=("L1.H2",)))
        auto = {"steps": "auto", "max_steps": 3}  # which measures as well
        options = TUNE.model_copy(update={"gradient_accumulation_steps": parts, "hints": Hints(), **auto})
        return tune(model, tokenizer, options, data=train_text)

    whole, divided = log(1), log(4)  # of which the last has no text
    assert len(whole) == 3
    for one, other in zip(whole, divided, strict=True):
        numbers = {name for name in other if isinstance(other[name], float)}
        assert one == {**other, **{name: pytest.approx(other[name], rel=1e-4) for name in numbers}}
        assert {"loss", "hits", "hints", "kl"} <= numbers
    assert whole[0]["hits"] > 0


def test_a_text_in_whose_first_steps_is_no_hit_is_refused(tokenizer, train_text):
    """Before the work begins, where nothing else teaches retrieval."""
    options = TUNE.model_copy(update={"text_tokens": 4, "text_batch_size": 1})
    with pytest.raises(UserError, match="the text of the first 16 steps has no recall hit"):
        batches.check(tokenizer, options, train_text)
    batches.check(tokenizer, TUNE, train_text)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["tune.lessons=[]"], "lessons: is empty, so that nothing teaches retrieval"),
        (["tune.hit_weight=1", "tune.text_batch_size=0"], "hit_weight: hits are found in text"),
        (["tune.rename={}"], "rename: is for text whose recall hits are learnt"),
    ],
)
def test_what_does_not_fit_is_refused(settings, line):
    with pytest.raises(UserError, match=line):
        read_recipe(None, settings, model="x")
