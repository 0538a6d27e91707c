"""Bench: the same questions for all, what it says of models that are equal, better or changed, and what is measured twice."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Mamba2Config, Mamba2ForCausalLM

from surgery.errors import UserError
from surgery.evaluation import bench as bench_module
from surgery.evaluation.bench import bench
from surgery.evaluation.controls import CONTROLS, CopyCache, describe_model, find_followers, fit_copy_cache, is_control
from surgery.evaluation.costs import cache_bytes, measure_costs, read_context
from surgery.evaluation.suites import SUITES, Given, measurements, twice
from surgery.evaluation.texts import HeldOutText, measure_on_text, open_held_out, token_losses
from surgery.evaluation.verdict import lost, main_measurement
from surgery.models.digests import fingerprint
from surgery.records.plan import Plan, Start
from surgery.records.recipe import Bench, Data
from surgery.records.report import Change, Report
from surgery.splicing.splice import adopt, splice

FOLDER = "checkpoints/tiny-mamba2"
SMALL = Bench(limit=6, pairs=(2, 3), windows=2, window=32, contexts=(24,), controls=())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1}
    return Mamba2ForCausalLM(
        Mamba2Config(vocab_size=1664, chunk_size=16, pad_token_id=0, initializer_range=0.4, **sizes)
    ).eval()


def hybrid_of(base, null=None, closed_below=0.0, gate=1.0):
    return splice(base, Plan(sites="L1.H0", starts={"L1.H0": Start(null=null)}, gate=gate, closed_below=closed_below))


def test_equal_models_do_not_differ(base, tokenizer):
    report = bench({"base": base, "same": hybrid_of(base, gate=0.0)}, tokenizer, SMALL)
    assert all(
        change.mean == 0 and not change.shown for name, change in report.models["same"].changes.items() if name != "text"
    )
    assert report.models["same"].on_text.kl.mean < 1e-6
    assert report.verdict.answer in ("no", "not judged")
    assert report.verdict.model == "same"
    assert report.models["same"].fingerprint != report.base.fingerprint


def test_a_closed_graft_leaves_every_text_as_it_was(base, tokenizer):
    closed = bench({"base": base, "hybrid": hybrid_of(base, null=1e4, closed_below=0.02)}, tokenizer, SMALL).models["hybrid"]
    assert (closed.on_text.acts.mean, closed.on_text.untouched, closed.on_text.change_before) == (0, 2, 0)
    assert closed.on_text.kl.mean == 0
    assert closed.changes["text"].mean == 0
    opened = bench({"base": base, "hybrid": hybrid_of(base)}, tokenizer, SMALL).models["hybrid"]
    assert (opened.on_text.acts.mean, opened.on_text.untouched) == (1, 0)
    assert opened.on_text.kl.mean > 0


def test_before_a_graft_first_acts_nothing_changes(base, tokenizer):
    """A null key at which the graft opens somewhere in the text."""
    given = Given(tokenizer, SMALL, Data(), 0)
    rows, owner = open_held_out(tokenizer, given.data, 256, 0).rows(4, 64)
    for null in (4.0, 6.0, 8.0, 10.0):
        found = measure_on_text(adopt(base).eval(), hybrid_of(base, null=null, closed_below=0.5).eval(), rows, owner, 4)
        assert found.change_before == 0
        if 0 < found.acts.mean < 1:
            return
    pytest.fail("no null key that opens the graft at some tokens only")


def test_a_report_reads_back(base, tokenizer, tmp_path):
    report = bench({"base": base, "hybrid": hybrid_of(base)}, tokenizer, SMALL, base_name="/somewhere/tiny-mamba2")
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == report
    assert report.provenance.base == "tiny-mamba2"
    assert "/somewhere" not in report.text()


def test_the_model_that_is_measured_is_the_one_that_is_named(base, tokenizer, tmp_path, capsys):
    """A base that peft changed in place, by merging a LoRA into its hybrid, is named and measured as it is now."""
    hybrid = hybrid_of(base)
    first = bench({"base": base, "hybrid": hybrid}, tokenizer, SMALL, folder=tmp_path)
    assert "measured as it is now" not in capsys.readouterr().err
    learns = get_peft_model(hybrid, LoraConfig(target_modules=["in_proj"], init_lora_weights=False))
    second = bench({"base": base, "hybrid": learns.merge_and_unload()}, tokenizer, SMALL, folder=tmp_path)
    assert second.base.fingerprint == second.provenance.fingerprint == fingerprint(base) != first.base.fingerprint
    assert second.base.results["text"] != first.base.results["text"]
    assert "'backbone.layers.0.mixer.in_proj.weight'" in capsys.readouterr().err


class Counting:
    """Counts how often a model is asked."""

    def __init__(self, monkeypatch):
        self.asked = []
        original = bench_module._ask
        monkeypatch.setattr(bench_module, "_ask", lambda each, model: self.asked.append(each.name) or original(each, model))


def test_what_was_measured_is_found_again_and_nothing_stale(base, tokenizer, tmp_path, monkeypatch):
    counting, text = Counting(monkeypatch), tmp_path / "text.txt"
    text.write_text("The old bridge was closed. " * 40)
    data = Data(held_out_text=str(text))
    first = bench({"base": base}, tokenizer, SMALL, data=data, folder=tmp_path / "kept")
    assert len(counting.asked) == len(first.measurements)
    counting.asked.clear()
    assert bench({"base": base}, tokenizer, SMALL, data=data, folder=tmp_path / "kept").base.results == first.base.results
    assert counting.asked == []
    text.write_text("In the morning she sold a lamp. " * 40)  # the same name, other words
    second = bench({"base": base}, tokenizer, SMALL, data=data, folder=tmp_path / "kept")
    assert counting.asked == ["text"]
    assert second.base.results["text"] != first.base.results["text"]
    counting.asked.clear()
    with torch.no_grad():
        base.backbone.layers[0].mixer.D.add_(0.1)
    bench({"base": base}, tokenizer, SMALL, data=data, folder=tmp_path / "kept")
    assert len(counting.asked) == len(first.measurements)


def test_damaged_files_are_measured_again(base, tokenizer, tmp_path):
    first = bench({"base": base}, tokenizer, SMALL, folder=tmp_path)
    for path in tmp_path.iterdir():
        path.write_text("{")
    assert bench({"base": base}, tokenizer, SMALL, folder=tmp_path).base.results == first.base.results


def test_training_mode_is_left_as_it_was(base, tokenizer):
    hybrid = hybrid_of(base).train()
    bench({"base": base.eval(), "hybrid": hybrid}, tokenizer, SMALL)
    assert hybrid.training
    assert not base.training


def test_controls_that_need_no_training_are_measured(base, tokenizer):
    options = SMALL.model_copy(update={"controls": ("prompt_twice", "copy_cache")})
    report = bench({"base": base, "hybrid": hybrid_of(base)}, tokenizer, options)
    controls = {name: model for name, model in report.models.items() if model.role == "control"}
    assert set(controls) == {"control_prompt_twice", "control_copy_cache"}
    assert all(model.behind is not None for model in controls.values())
    assert "text" not in controls["control_prompt_twice"].results
    assert report.best_control() in controls


def test_a_model_that_answers_better_is_a_yes_unless_a_control_does_too(base, tokenizer, monkeypatch):
    monkeypatch.setattr(bench_module, "_ask", lambda each, model: [1.0 if model.training else i % 2 for i in range(40)])
    monkeypatch.setattr(bench_module, "measuring", lambda models: __import__("contextlib").nullcontext())
    options = Bench(limit=40, pairs=(4,), unseen_pairs=(), contexts=(), controls=(), suites=("kv",), windows=1, window=8)
    models = {"base": base.eval(), "tuned": hybrid_of(base).train(), "control_tuned": hybrid_of(base).eval()}
    report = bench(models, tokenizer, options)
    assert report.verdict.answer == "yes"
    assert not report.verdict.advice
    assert report.models["control_tuned"].behind.low > 0
    models["control_tuned"].train()
    assert bench(models, tokenizer, options).verdict.answer == "unclear"


def test_a_yes_that_leaves_most_behind_says_what_to_try(base, tokenizer, monkeypatch):
    right = lambda training: [float(i % 2 or (training and i % 10 == 0)) for i in range(400)]  # noqa: E731
    monkeypatch.setattr(bench_module, "_ask", lambda each, model: right(model.training))
    monkeypatch.setattr(bench_module, "measuring", lambda models: __import__("contextlib").nullcontext())
    options = Bench(limit=400, pairs=(4,), unseen_pairs=(), contexts=(), controls=(), suites=("kv",), windows=1, window=8)
    report = bench({"base": base.eval(), "tuned": hybrid_of(base).train()}, tokenizer, options)
    assert report.verdict.answer == "yes"
    assert "tune.lora" in report.verdict.advice


@pytest.mark.parametrize("suite", list(SUITES))
def test_every_suite_asks_all_models_the_same(suite, base, tokenizer, monkeypatch):
    monkeypatch.setattr("surgery.evaluation.suites.COUNTED", 2**12)
    options = SMALL.model_copy(update={"suites": (suite, "kv"), "contexts": (192,), "windows": 24})
    given = Given(tokenizer, options, Data(rare=1e6), 0)
    made, again = measurements(given), measurements(given)
    assert [each.digest for each in made] == [each.digest for each in again]
    assert len({each.name for each in made}) == len(made)
    other = measurements(Given(tokenizer, options, Data(rare=1e6), 1))
    for mine, different in zip(made, other, strict=True):
        values = mine.ask(base.eval())
        assert values.ndim == 1
        assert np.isfinite(values).all()
        assert np.array_equal(values, mine.ask(adopt(base))) or np.allclose(values, mine.ask(adopt(base)), atol=1e-4)
        if mine.name != "knowledge":  # there are only so many facts
            assert mine.digest != different.digest


def test_toy_text_and_facts_are_not_asked_of_other_models(base, tokenizer, monkeypatch):
    monkeypatch.setattr("surgery.tuning.text.is_toy_tokenizer", lambda _: False)
    names = [each.name for each in measurements(Given(tokenizer, SMALL, Data(), 0))]
    assert not {"text", "knowledge", "multiple_choice"} & set(names)
    with pytest.raises(UserError, match="text"):
        measurements(Given(tokenizer, SMALL.model_copy(update={"suites": ("text",)}), Data(), 0))


def test_a_prompt_is_read_twice(tokenizer):
    (first, *_) = measurements(Given(tokenizer, SMALL, Data(), 0))
    again = twice(first, Given(tokenizer, SMALL, Data(), 0))
    assert again.questions[0].prompt.count(first.questions[0].prompt) == 2
    assert again.questions[0].answer == first.questions[0].answer
    assert again.digest != first.digest


def test_losses_are_those_of_the_model(base, tokenizer):
    rows, _ = open_held_out(tokenizer, Data(), 64, 0).rows(2, 32)
    base = base.eval().double()
    with torch.no_grad():
        expected = [base(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    assert token_losses(base, rows, 2).mean(1) == pytest.approx(expected, rel=1e-5)


def test_documents_are_the_units_of_text():
    several = HeldOutText("x", tuple(np.arange(n) for n in (25, 7, 40)))
    rows, owner = several.rows(5, 10)
    assert owner.tolist() == [0, 1, 0, 1, 1]
    assert rows[2].tolist() == list(range(10, 20))
    one = HeldOutText("x", (np.arange(35),))
    assert one.rows(9, 10)[1].tolist() == [0, 1, 2]
    with pytest.raises(UserError, match="x"):
        one.rows(1, 36)


def test_a_cache_grows_by_what_the_graft_remembers(base):
    hybrid = hybrid_of(base).eval()
    sizes = {name: [cache_bytes(read_context(m, n)) for n in (16, 32)] for name, m in (("base", base), ("hybrid", hybrid))}
    assert sizes["base"][0] == sizes["base"][1]
    per_token = (sizes["hybrid"][1] - sizes["hybrid"][0]) / 16
    assert per_token == 4 * (32 + 8 + 1)  # a key, a value and what is added to its score, in float32
    costs = measure_costs({"base": base, "hybrid": hybrid}, 16, 2, reading=True)
    assert costs["base"].token.mean == costs["base"].reading.mean == 1
    assert costs["hybrid"].cache_bytes > costs["base"].cache_bytes


def test_a_copy_cache_says_what_followed_before():
    found = find_followers([5, 6, 7, 5, 6, 8, 5, 6])
    assert found[0] == (0, {})
    assert found[3] == (1, {6: 1})
    assert found[-1] == (2, {7: 1, 8: 1})


def test_a_copy_cache_mixes_probabilities(base, tokenizer):
    rows, _ = open_held_out(tokenizer, Data(), 96, 0).rows(3, 32)
    base = base.eval()
    assert token_losses(CopyCache(base, {}), rows, 3) == pytest.approx(token_losses(base, rows, 3), abs=1e-4)
    fitted = fit_copy_cache(base, rows, 2)
    assert token_losses(fitted, rows, 3).mean() <= token_losses(base, rows, 3).mean() + 1e-6
    ids = rows[:1]
    whole = fitted(input_ids=ids).logits
    assert torch.allclose(whole.exp().sum(-1), torch.ones(1, 32), atol=1e-4)
    some = torch.tensor([3, 9])
    assert torch.allclose(fitted(input_ids=ids, logits_to_keep=some).logits, whole[:, some], atol=1e-5)


def test_models_in_plain_words(base):
    hybrid = hybrid_of(base)
    assert describe_model("tuned", hybrid).startswith("1 located head,")
    assert describe_model("control_same_layer", hybrid).startswith("1 other head ")
    assert describe_model("my-model", hybrid) == describe_model("my-model") == "my-model"
    assert all("as many" not in describe_model(f"control_{name}", hybrid) for name in CONTROLS)
    assert is_control("control_tuned")
    assert not is_control("control_of_mine")


def test_the_main_measurement_is_known_beforehand():
    assert main_measurement(["text", "kv.4", "kv.64", "kv_unseen.64", "knowledge"]) == "kv.64"
    assert main_measurement(["text", "needle.256", "needle.1024"]) == "needle.1024"
    assert main_measurement(["bigrams.512", "bigrams.2048", "other_tokens.2048"]) == "bigrams.2048"
    assert main_measurement(["text"]) == "text"


def test_one_row_shows_no_loss():
    measured = {"text": SimpleNamespace(metric="loss", label="held-out text")}
    for n, said in ((1, []), (9, ["held-out text (+0.020)"])):
        change = Change(mean=0.02, low=0.02, high=0.02, n=n, p=1.0)
        assert lost(measured, SimpleNamespace(changes={"text": change})) == said


def test_without_models_it_says_so(tokenizer):
    with pytest.raises(UserError, match="models"):
        bench({}, tokenizer)


def test_a_text_is_read_once_for_two_measurements_of_it(base, tokenizer, monkeypatch):
    monkeypatch.setattr("surgery.evaluation.suites.COUNTED", 2**12)
    options = SMALL.model_copy(update={"suites": ("bigrams",), "contexts": (128,), "windows": 32})
    repeated, others = measurements(Given(tokenizer, options, Data(rare=1e6), 0))
    read = []
    base.register_forward_hook(lambda *_: read.append(1))
    first = repeated.ask(base), others.ask(base)
    once = len(read)
    with torch.no_grad():
        base.backbone.layers[0].mixer.D.add_(0.5)
    second = repeated.ask(base), others.ask(base)
    assert len(read) == 2 * once
    assert all(not np.array_equal(before, after) for before, after in zip(first, second, strict=True))
