"""Pretraining on text of one's own: what is learnt from, interruptions, and what is refused."""

import json
import math
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given
from hypothesis import strategies as st

from surgery.errors import UserError
from surgery.evaluation.report import Report
from surgery.exporting.export import export
from surgery.pretraining import corpus_training, pretrain, training
from surgery.pretraining.chunked_entropy import mean_cross_entropy
from surgery.pretraining.corpus import RECORD, Windows, files, prepared, spread
from surgery.pretraining.recipe import KEYS, CorpusOptions, PretrainRecipe, parsed_pretrain_recipe, read_pretrain_recipe
from surgery.records.plan import Plan
from surgery.records.recipe import Rename
from surgery.records.sections.gone import gone_of
from surgery.runtime.deferring import deferred
from surgery.splicing.load import load
from surgery.splicing.splice import splice
from surgery.tuning.renaming import Renaming
from surgery.tuning.state import Checkpoints
from surgery.world.text import document
from surgery.world.words import key_words
from tests.models import ROOT, names

SMALL = {
    "model_type": "mamba2", "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16, "state_size": 8,
    "n_groups": 1, "chunk_size": 16, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """A folder with two texts to learn, in another one that it holds, and one that is held out."""
    import random

    folder = tmp_path_factory.mktemp("books")
    (folder / "train" / "more").mkdir(parents=True)
    for number, name in enumerate(("train/b.txt", "train/more/a.md", "held out.txt", "train/notes.pdf")):
        rng = random.Random(number)
        lines = (document(rng, held_out=name.startswith("held"), sentences=3, facts_share=0.0) for _ in range(30))
        (folder / name).write_text("\n\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def recipe(books):
    """Six steps."""
    corpus = CorpusOptions(
        train=(str(books / "train"),), held_out=(str(books / "held out.txt"),), vocabulary=300, tokens=16, batch_size=3,
        eval_steps=3, eval_windows=4, save_steps=2,
    )  # fmt: skip
    return PretrainRecipe(architecture=SMALL, corpus=corpus, steps=6, warmup_steps=2, decay_from=0.5, examples=2)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in load(str(folder)).model.named_parameters()}


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_text_becomes_tokens_that_are_read_back(recipe, books, tmp_path):
    corpus = prepared(recipe.corpus, tmp_path)
    assert len(corpus.tokenizer) == 300
    assert [path.name for path in files(recipe.corpus.train, "train")] == ["b.txt", "a.md"]
    text, end = corpus.tokenizer.decode(corpus.train), corpus.tokenizer.eos_token
    assert text == "".join(end + (books / name).read_text() for name in ("train/b.txt", "train/more/a.md"))
    assert corpus.tokenizer.decode(corpus.held_out) == end + (books / "held out.txt").read_text()
    sizes = {side: corpus.about[side]["bytes"] for side in ("train", "held_out")}
    assert sizes == {"train": len(text) - 2 * len(end), "held_out": len((books / "held out.txt").read_text())}


def test_tokens_are_made_once(recipe, tmp_path, monkeypatch):
    prepared(recipe.corpus, tmp_path)
    monkeypatch.setattr("surgery.pretraining.corpus._make", None)
    prepared(recipe.corpus, tmp_path)
    with pytest.raises(TypeError):
        prepared(recipe.corpus.model_copy(update={"vocabulary": 301}), tmp_path)


def test_long_text_is_tokenised_in_pieces_that_end_with_lines(recipe, tmp_path, monkeypatch):
    whole = prepared(recipe.corpus, tmp_path / "whole")
    monkeypatch.setattr("surgery.pretraining.corpus.PIECE", 100)
    pieces = prepared(recipe.corpus, tmp_path / "pieces")
    assert pieces.tokenizer.decode(pieces.train) == whole.tokenizer.decode(whole.train)


def test_a_pass_shows_every_window_once_in_an_order_of_its_own():
    ids = np.arange(1000, dtype=np.uint16)
    windows = Windows(ids, tokens=16, seed=3)
    rows = torch.cat([windows.batch(step, 7) for step in range(2 * windows.count // 7)])
    assert rows.shape[1] == 17
    assert (rows.diff(dim=1) == 1).all()
    assert rows.max() < 1000
    first, second = rows[: windows.count, 0], rows[windows.count : 2 * windows.count, 0]
    assert len(set(first.tolist())) == windows.count == 61
    assert len({start % 16 for start in first.tolist()}) == 1
    assert first.tolist() != sorted(first.tolist())
    assert first[: len(second)].tolist() != second.tolist()
    assert torch.equal(Windows(ids, tokens=16, seed=3).batch(40, 7), windows.batch(40, 7)), "whatever was seen before"
    assert not torch.equal(Windows(ids, tokens=16, seed=4).batch(0, 7), windows.batch(0, 7))


def test_every_window_has_names_of_its_own(recipe, tmp_path, monkeypatch):
    """The log then says what a repeated pair costs, and what the same pairs cost where they stand first."""
    named = recipe.model_copy(
        update={"corpus": recipe.corpus.model_copy(update={"rename": Rename(rare=20_000.0), "tokens": 64, "repeats": 0.25})}
    )
    monkeypatch.setattr(corpus_training, "RARE", 10_000.0)
    run(named, tmp_path / "base")
    log = [json.loads(line) for line in (tmp_path / "base" / "log.jsonl").read_text().splitlines()]
    assert {"hits", "firsts"} < {*log[-1]}
    card = (tmp_path / "base" / "README.md").read_text()
    assert "had been given other names; 25% of the windows repeated a passage" in card
    corpus = prepared(named.corpus, tmp_path)
    renaming = Renaming(corpus.tokenizer, corpus.pairs, 20_000.0)
    plain, renamed = (Windows(corpus.train, 64, 0, names).batch(1, 4).numpy() for names in (None, renaming))
    assert (plain != renamed).any(1).all()
    for before, after in zip(plain, renamed, strict=True):
        assert ((before[:, None] == before) == (after[:, None] == after)).all()
    again = Windows(corpus.train, 64, 0, renaming)
    assert (again.batch(1, 4).numpy() == renamed).all()


@given(st.integers(2, 40), st.floats(0, 1), st.integers(0, 5))
def test_some_windows_repeat_a_passage_until_they_end(tokens, repeats, seed):
    """The others are as they would be, and so is the beginning of these."""
    ids = np.arange(tokens * 60)
    plain, repeated = (Windows(ids, tokens, seed, repeats=share).batch(0, 50).numpy() for share in (0.0, repeats))
    changed = (plain != repeated).any(1)
    assert changed.mean() == pytest.approx(repeats, abs=0.3)
    for before, after in zip(plain[changed], repeated[changed], strict=True):
        passage = len({*after.tolist()})
        assert max(1, tokens // 4) <= passage <= max(1, tokens // 2)
        assert after.tolist() == [before[i % passage] for i in range(tokens + 1)]


def test_held_out_windows_are_spread_over_the_text():
    rows = spread(np.arange(100), 10, 4)
    assert rows[:, 0].tolist() == [0, 20, 50, 70]
    assert spread(np.arange(100), 10, 99)[:, 0].tolist() == list(range(0, 100, 10))


@pytest.mark.parametrize("size", [7, 300])
def test_the_loss_and_its_gradient_are_those_of_torch(size):
    """In parts of 128 tokens, of which the last is smaller."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 12, dtype=torch.double, requires_grad=True) for n in (size, 2**14))
    targets = torch.randint(2**14, (size,))
    own = torch.autograd.grad(3 * mean_cross_entropy(hidden, weight, targets), (hidden, weight))
    whole = torch.autograd.grad(3 * F.cross_entropy(hidden @ weight.t(), targets), (hidden, weight))
    torch.testing.assert_close(own, whole)
    with torch.no_grad():
        torch.testing.assert_close(mean_cross_entropy(hidden, weight, targets), F.cross_entropy(hidden @ weight.t(), targets))


def test_the_loss_in_bfloat16_is_near():
    torch.manual_seed(0)
    hidden, weight = torch.randn(200, 32, requires_grad=True), (0.1 * torch.randn(500, 32)).requires_grad_()
    targets = torch.randint(500, (200,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_cross_entropy(hidden, weight, targets)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    exact = F.cross_entropy(hidden @ weight.t(), targets)
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 5e-3
    for gradient, wanted in zip(gradients, torch.autograd.grad(exact, (hidden, weight)), strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - wanted).norm() < 1e-2 * wanted.norm()


def run(recipe, out, **options):
    return pretrain.pretrain(recipe, out, **options)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """The folder of an uninterrupted training. Do not change it."""
    folder = tmp_path_factory.mktemp("whole") / "base"
    run(recipe, folder)
    return folder


def test_a_base_is_trained_measured_and_described(recipe, whole, tmp_path):
    papers = {"recipe.yaml", "log.jsonl", "measured.json", "README.md"}
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {*names(whole)} == papers | model
    measured = json.loads((whole / "measured.json").read_text())
    log = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 3, 6]
    assert log[0]["loss"] == pytest.approx(math.log(304), abs=3)
    assert log[-1]["held_out"] == pytest.approx(measured["nats_per_token"]["value"], abs=0.5)
    per_token, per_byte = measured["nats_per_token"]["value"], measured["nats_per_byte"]["value"]
    assert per_byte < per_token < 20 * per_byte
    lengths = {key.partition(".")[2] for key in measured if key.startswith("others.")}
    assert lengths == {"16", "32", "64", "128"}
    assert f"{measured['nats_per_token']['value']:.3f}" in (whole / "README.md").read_text()
    assert read_pretrain_recipe(whole / "recipe.yaml") == recipe
    assert load(str(whole)).tokenizer("It was noon.")["input_ids"]


class Stopped(Exception):
    """What a signal's handler raised."""


@contextmanager
def signalled(step):
    """Meanwhile SIGTERM comes within a step of training."""
    own, taken = corpus_training._loss, iter(range(10**6))

    def loss(model, rows):
        if model.training and next(taken) == step:
            signal.raise_signal(signal.SIGTERM)
        return own(model, rows)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus_training, "_loss", loss)
        yield


def interrupted(step, work):
    with signalled(step), pytest.raises(Stopped):
        work()


def stopping(number, _):
    raise Stopped


@pytest.fixture
def raising():
    """SIGTERM raises, as it does in the command line."""
    before = signal.signal(signal.SIGTERM, stopping)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("step", [2, 5])
@pytest.mark.usefixtures("raising")
def test_interrupted_it_ends_where_an_uninterrupted_training_does(step, recipe, whole, tmp_path):
    """Within a step that would have been saved, and within one that would not; the step is finished, and what it reached
    kept."""
    interrupted(step, lambda: run(recipe, tmp_path / "parts"))
    assert [path.name for path in (tmp_path / "parts-pretraining").glob("checkpoint-*")] == [f"checkpoint-{step + 1}"]
    assert not (tmp_path / "parts").exists()
    run(recipe, tmp_path / "parts")
    assert equal(weights(tmp_path / "parts"), weights(whole))
    for name in ("log.jsonl", "measured.json", "recipe.yaml"):
        assert (tmp_path / "parts" / name).read_bytes() == (whole / name).read_bytes()
    if step == 5:  # what is finished is measured and written again
        assert run(recipe, tmp_path / "parts") == json.loads((whole / "measured.json").read_text())


def test_a_signal_whose_handler_raises_nothing_leaves_no_checkpoint_behind(recipe, tmp_path):
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with signalled(1), pytest.raises(UserError, match="a signal ended it after step 2; the same command goes on"):
            run(recipe, tmp_path / "base")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "base").exists()


def test_killed_it_goes_on_from_what_it_kept(recipe, whole, tmp_path, monkeypatch):
    own, saved = Checkpoints.save, []

    def save(self, *arguments):
        own(self, *arguments)
        saved.append(self)
        if len(saved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", save)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "parts")
    run(recipe, tmp_path / "parts")
    assert equal(weights(tmp_path / "parts"), weights(whole))


@pytest.mark.usefixtures("raising")
def test_the_number_of_steps_may_change_until_the_rate_falls(recipe, whole, tmp_path):
    """What was begun for 40 steps and goes on for 6 is what 6 would have given."""
    long = recipe.model_copy(update={"steps": 40})
    interrupted(2, lambda: run(long, tmp_path / "parts"))
    interrupted(1, lambda: run(recipe, tmp_path / "parts"))
    with pytest.raises(UserError, match=r"at step 5 of 6 the learning rate falls already.* set steps: 6, or remove the folder"):
        run(long, tmp_path / "parts")
    run(recipe, tmp_path / "parts")
    assert equal(weights(tmp_path / "parts"), weights(whole))


@pytest.mark.usefixtures("raising")
def test_finish_lets_the_rate_fall_from_where_it_is(recipe, tmp_path):
    """And so does the same command without it, once that was said."""
    long, out = recipe.model_copy(update={"steps": 10_000}), tmp_path / "parts"
    with pytest.raises(UserError, match="no step was taken yet"):
        run(long, out, finish=True)
    interrupted(2, lambda: run(long, out))
    interrupted(1, lambda: run(long, out, finish=True))
    run(long, out)
    assert read_pretrain_recipe(out / "recipe.yaml").steps == 7
    assert json.loads((out / "log.jsonl").read_text().splitlines()[-1])["step"] == 7
    run(recipe.model_copy(update={"steps": 7}), tmp_path / "whole")
    assert equal(weights(out), weights(tmp_path / "whole"))


@pytest.mark.usefixtures("raising")
def test_other_settings_or_text_are_not_gone_on_with(recipe, books, tmp_path):
    interrupted(1, lambda: run(recipe, tmp_path / "base"))
    corpus = recipe.corpus.model_copy(update={"train": (str(books / "train" / "b.txt"),)})
    for changed, name in (
        (recipe.model_copy(update={"learning_rate": 1e-3}), "learning_rate"),
        (recipe.model_copy(update={"corpus": recipe.corpus.model_copy(update={"batch_size": 2})}), "corpus.batch_size"),
        (recipe.model_copy(update={"corpus": corpus}), "corpus.text"),
    ):
        with pytest.raises(UserError, match=rf"made with another {name}; remove the folder .*base-pretraining to begin anew"):
            run(changed, tmp_path / "base")


def test_a_base_is_stored_in_bfloat16_and_trained_with_an_existing_tokenizer(recipe, tmp_path):
    fields = {"dtype": "bfloat16", "tokenizer": str(ROOT / "checkpoints" / "tiny-mamba2")}
    corpus = CorpusOptions(**recipe.corpus.model_dump() | fields)
    run(recipe.model_copy(update={"corpus": corpus, "mixed_precision": "bf16", "steps": 2}), tmp_path / "base")
    loaded = load(str(tmp_path / "base"))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.tokenizer.get_vocab() == load(fields["tokenizer"]).tokenizer.get_vocab()


OPERATION = """
model: base
data: {{train_text: "{books}/train/more", held_out_text: "{books}/held out.txt"}}
locate: {{probe: recall, options: {{source: "{books}/train/b.txt", words: 64, rare: 5000}}, examples: 4, exact: false}}
plan: {{heads: 1}}
tune: {{steps: 2, lessons: [], hit_weight: 1.0, rare: 5000, batch_size: 1, text_batch_size: 1, text_tokens: 64}}
bench: {{suites: [hits], contexts: [64, 128], windows: 8, window: 32, rare: 5000, random_sites: 1}}
"""


@pytest.mark.slow  # the parts have quick tests of their own
def test_a_base_is_operated_on_with_nothing_but_text(recipe, books, surgery, tmp_path):
    """A tokenizer of its own, a folder of texts, recall hits: as recipes/books.yaml does it."""
    run(recipe, tmp_path / "base")
    (tmp_path / "operation.yaml").write_text(OPERATION.format(books=books))
    status, _, err = surgery("run", "operation.yaml", "--out", "done")
    assert status == 0, err
    report = Report.read(tmp_path / "done" / "report.json")
    assert {"base", "spliced", "tuned", "control_tuned", "control_random_site_tuned"} <= set(report.models)
    for model in report.models.values():
        assert {"recall_hits.64", "other_tokens.64", "recall_hits.128", "other_tokens.128"} == set(model.tasks)


def test_a_loss_that_is_not_finite_ends_it(recipe, tmp_path, monkeypatch):
    for module, asked in ((corpus_training, recipe), (training, PretrainRecipe(architecture=SMALL))):
        monkeypatch.setattr(module, "_loss", lambda *_, **__: torch.tensor(float("nan"), requires_grad=True))
        with pytest.raises(UserError, match="the loss is nan at step 1; lower learning_rate"):
            run(asked, tmp_path / "base")


def refused(recipe, tmp_path, **changes):
    corpus = CorpusOptions(**recipe.corpus.model_dump() | changes)
    with pytest.raises(UserError) as refusal:
        run(recipe.model_copy(update={"corpus": corpus}), tmp_path / "base")
    (line,) = str(refusal.value).splitlines()
    return line


def test_text_that_cannot_be_learnt_is_refused_in_one_line(recipe, books, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "copy.txt").write_text((books / "train" / "b.txt").read_text() + "\n")
    (tmp_path / "short.txt").write_text("Short.")
    for changes, words in (
        ({"train": "nowhere.txt"}, "cannot read the text (corpus.train) nowhere.txt: No such file or directory"),
        ({"train": str(tmp_path / "empty")}, f"corpus.train: the folder {tmp_path / 'empty'} holds no file of .txt or .md"),
        ({"train": str(tmp_path / "broken.txt")}, "broken.txt: not UTF-8 at byte 0"),
        ({"held_out": str(books / "train" / "b.txt")}, "b.txt is also learnt from; leave it out of one of the two"),
        ({"held_out": str(tmp_path / "copy.txt")}, "% of this text is also in corpus.train; at most 5% may be"),
        ({"train": str(tmp_path / "short.txt")}, "windows of 16 (corpus.tokens) need 33"),
        ({"held_out": str(tmp_path / "short.txt")}, "and a window needs 17 (corpus.tokens)"),
        ({"tokenizer": str(tmp_path / "empty")}, "empty is not a model folder"),
    ):
        before = {*tmp_path.iterdir()}
        assert words in refused(recipe, tmp_path, **changes)
        assert {*tmp_path.iterdir()} == before
    assert "corpus.tokens" in refused(recipe, tmp_path / "new" / "folder", held_out=str(tmp_path / "short.txt"))
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("corpus: {train: a}", "corpus.held_out is missing"),
        ("corpus: {train: a, held_out: b, tokns: 3}", "unknown key 'corpus.tokns'; did you mean corpus.tokens?"),
        ("corpus: {train: [], held_out: b}", "corpus.train"),
        ("corpus: {train: a, held_out: b, tokens: 1000000, batch_size: 1000}", "tokens; at most"),
        ("corpus: {train: a, held_out: b}\nkv_targets: 3", "kv_targets: belongs to the small world"),
        ("attention: L1.H0", "attention: whole layers are attention from the start; write L1, not L1.H0"),
        ("curriculum: {last: 129}", "from 2 to 129 pairs: first is at most last, and last at most 128"),
    ],
)
def test_recipes_that_mean_nothing_are_refused_in_one_line(lines, words, tmp_path):
    (tmp_path / "x.yaml").write_text(f"architecture: {{model_type: mamba2}}\n{lines}\n")
    with pytest.raises(UserError) as refusal:
        read_pretrain_recipe(tmp_path / "x.yaml")
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_models_that_cannot_be_made_are_refused_in_one_line(recipe, tmp_path):
    for architecture, words in (
        ({"model_type": "mambo"}, "architecture: transformers knows no model_type mambo"),
        (SMALL | {"num_heads": 3}, "architecture: no model can be made of this: .*: ValueError: Inconsistent"),
        (SMALL | {"n_groups": 3}, "architecture: the model cannot read 16 tokens: ValueError: 2 heads in 3 groups"),
        ({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}, "cannot analyse a gpt2 model"),
        ({"model_type": "bert", "hidden_size": 12, "num_hidden_layers": 1}, "bert"),
    ):
        with pytest.raises(UserError, match=words) as refusal:
            run(recipe.model_copy(update={"architecture": architecture}), tmp_path / "base")
        assert len(str(refusal.value).splitlines()) == 1


def test_training_begins_with_a_model_that_is_there(recipe, whole, tmp_path):
    """With its weights and its tokenizer; an interrupted one goes on, and the recipe that is written makes it again."""
    shutil.copytree(whole, tmp_path / "first")
    corpus = recipe.corpus.model_copy(update={"vocabulary": 400})
    settings = recipe.model_dump(mode="json", exclude={"architecture"}) | {"corpus": corpus.model_dump(mode="json"), "seed": 1}
    second = parsed_pretrain_recipe(settings | {"start": str(tmp_path / "first"), "steps": 2, "learning_rate": 1e-9}, "x")
    run(second, tmp_path / "second")
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert before.keys() == after.keys()
    assert all(torch.allclose(tensor, after[name], atol=1e-7) for name, tensor in before.items())
    assert len(load(str(tmp_path / "second")).tokenizer) == 300
    card = (tmp_path / "second" / "README.md").read_text()
    assert "trained further, from the weights of first, on running text with the tokenizer of first of 300 tokens" in card
    written = read_pretrain_recipe(tmp_path / "second" / "recipe.yaml")
    assert (written.start, written.corpus.tokenizer) == (str(tmp_path / "first"), None)
    run(written, tmp_path / "third")
    assert equal(weights(tmp_path / "third"), after)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": SMALL}, "start: is a whole model; leave out architecture"),
        ({"corpus": None}, "start: is for text of one's own"),
        ({"start": None}, "architecture: is missing"),
    ],
)
def test_a_start_that_means_nothing_is_refused(changes, words):
    settings = {"start": "model", "corpus": {"train": "a", "held_out": "b"}}
    with pytest.raises(UserError, match=words):
        parsed_pretrain_recipe(settings | changes, "x")


def test_a_start_may_have_another_tokenizer(recipe, whole, tmp_path):
    """The models of state-spaces come without one."""
    bare = shutil.copytree(whole, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    corpus = recipe.corpus.model_copy(update={"tokenizer": str(whole)})
    settings = {"architecture": {}, "start": str(bare), "corpus": corpus}
    run(recipe.model_copy(update=settings), tmp_path / "second")
    assert len(load(str(tmp_path / "second")).tokenizer) == 300
    settings["corpus"] = corpus.model_copy(update={"tokenizer": str(ROOT / "checkpoints" / "tiny-mamba2")})
    with pytest.raises(UserError, match=r"knows \d+ tokens, and the tokenizer has [\d,]+|vocabulary"):
        run(recipe.model_copy(update=settings), tmp_path / "third")


def test_a_hybrid_is_no_start(recipe, tmp_path):
    hybrid = splice(load(str(ROOT / "checkpoints" / "tiny-mamba2")), Plan(sites=("L1.H1",)))
    export(hybrid, tmp_path / "hybrid", verify="tensors")
    with pytest.raises(UserError, match="is a hybrid; `surgery tune` trains grafts"):
        run(recipe.model_copy(update={"architecture": {}, "start": str(tmp_path / "hybrid")}), tmp_path / "base")


def test_what_follows_from_the_tokenizer_is_no_part_of_an_architecture():
    for name in ("vocab_size", "eos_token_id", "dtype"):
        with pytest.raises(UserError, match=f"architecture: leave out {name}"):
            parsed_pretrain_recipe({"architecture": SMALL | {name: 1}}, "x")
    assert len(key_words("all", 128)) == KEYS


@pytest.mark.parametrize("corpus", [True, False])
def test_models_are_tried_before_the_work(corpus, recipe, tmp_path, monkeypatch):
    """Before any text is tokenised, or a step is taken."""
    recipe = recipe if corpus else PretrainRecipe(architecture=SMALL)
    recipe = recipe.model_copy(update={"architecture": SMALL | {"n_groups": 3}})
    monkeypatch.setattr(pretrain, "prepared", None)
    monkeypatch.setattr(pretrain, "train", None)
    with pytest.raises(UserError, match="heads in 3 groups"):
        run(recipe, tmp_path / "base")
    assert not list(tmp_path.iterdir())


def test_damaged_tokens_are_named(recipe, tmp_path):
    prepared(recipe.corpus, tmp_path)
    for name in ("train.tokens", RECORD, "tokenizer.json"):
        (file,) = tmp_path.glob(f"*/{name}")
        whole = file.read_bytes()
        for content in (b"", b"{}") if name == RECORD else (b"", b"{}", None):  # without its record none were made
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(UserError, match=r"is damaged \(.*\): delete that folder, and it is made again") as refusal:
                prepared(recipe.corpus, tmp_path)
            assert len(str(refusal.value).splitlines()) == 1
        file.write_bytes(whole)
    file.with_name(RECORD).unlink()
    prepared(recipe.corpus, tmp_path)


def test_the_small_world_knows_no_finish(tmp_path):
    with pytest.raises(UserError, match="--finish is for text of one's own"):
        run(PretrainRecipe(architecture=SMALL), tmp_path / "base", finish=True)


def test_the_recipe_of_an_earlier_checkpoint_is_what_it_was():
    """Nothing that only concerns other text is written for the small world, nor the other way round."""
    tree = yaml.safe_load((ROOT / "checkpoints" / "tiny-mamba2" / "recipe.yaml").read_text())
    recipe = read_pretrain_recipe(ROOT / "checkpoints" / "tiny-mamba2" / "recipe.yaml")
    assert tree.keys() - gone_of("pretrain").keys() <= set(recipe.written())
    assert "corpus" not in recipe.written()
    books = read_pretrain_recipe(ROOT / "recipes" / "tiny-books.yaml").written()
    assert "kv_targets" not in books
    assert PretrainRecipe(**books).written() == books


@pytest.mark.usefixtures("raising")
def test_a_signal_waits_for_the_end_of_the_work():
    reached = []

    def work():
        with deferred() as came:
            reached.append(came())
            signal.raise_signal(signal.SIGTERM)
            reached.append(came())

    with pytest.raises(Stopped):
        work()
    assert reached == [False, True]
    with deferred():
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with deferred() as came:
        signal.raise_signal(signal.SIGTERM)
        assert not came()
    signal.signal(signal.SIGTERM, stopping)
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)  # what listened before does so again


def test_interrupted_the_command_line_names_the_same_command(recipe, surgery, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.written()))
    with signalled(1):
        status, _, err = surgery("pretrain", "recipe.yaml", "--out", "base")
    assert status == 128 + signal.SIGTERM
    assert err.splitlines()[-1].endswith("pretrain recipe.yaml --out base")
    assert (tmp_path / "base-pretraining" / "checkpoint-2").exists()
    assert not (tmp_path / "base").exists()
    status, out, err = surgery("pretrain", "recipe.yaml", "--out", "base")
    assert status == 0
    assert "pretrain: goes on from step 2" in err
    assert "nats_per_token" in out
    (corpus,) = (tmp_path / "base-pretraining").glob("corpus-*")
    assert (corpus / RECORD).exists()


def test_nothing_but_numbers_of_steps_is_free(recipe, tmp_path):
    """Every setting is either compared when a training goes on, or said to be free."""
    corpus = prepared(recipe.corpus, tmp_path)
    assert "start" not in corpus_training._settings(recipe, corpus)  # so that those of version 0.13 go on
    renamed = recipe.corpus.model_copy(update={"rename": Rename(), "repeats": 0.5})
    fixed = corpus_training._settings(recipe.model_copy(update={"start": "model", "corpus": renamed}), corpus)
    assert set(PretrainRecipe.model_fields) == set(fixed) | corpus_training.FREE | {"mixed_precision"}
    compared = set(fixed["corpus"]) - {"text", "mixed_precision"}  # the latter stands where version 0.11 had it
    assert set(CorpusOptions.model_fields) == compared | corpus_training.FREE_OF_CORPUS
    assert "mixed_precision" in fixed["corpus"]
