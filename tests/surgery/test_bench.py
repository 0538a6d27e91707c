"""Bench: the same decisions whatever the batch, the processes and the resumption; nothing compared that was not asked alike."""

import copy
import json

import numpy as np
import pytest

from surgery.errors import UserError
from surgery.evaluation import asking, cells, markdown, suites
from surgery.evaluation.bench import measure
from surgery.evaluation.report import Report
from surgery.evaluation.results import Perplexity, needle_tasks
from surgery.evaluation.suites import tasks
from surgery.figures.views import results as report_figures
from surgery.probes import probes
from surgery.records.plan import Plan
from surgery.records.recipe import Bench, Data
from surgery.splicing.splice import splice
from surgery.statistics import Estimate, Evidence
from tests.models import ROOT, SAME, VOCABULARY, random_base

SMALL = Bench(
    suites=("quick", "retrieval", "language", "speed"), pairs=(3, 6), limit=10, windows=3, window=32, contexts=(96,),
    batches=(1, 2),
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tokenizer):
    """A base and its hybrid: random, so that they are wrong in different ways."""
    base = random_base(vocab_size=VOCABULARY)
    return {"base": base, "hybrid": splice(base, Plan(sites=("L1.H2,5",)))}


@pytest.fixture(scope="module")
def finished(pair, tokenizer, tmp_path_factory):
    """(reports, the folder of cells)."""
    folder = tmp_path_factory.mktemp("cells")
    return measure(pair, tokenizer, SMALL, cells=folder), folder


def read(folder):
    """The cells; what was timed, of all models at once, lies beside them."""
    kept = [cells.Cell.read(path) for path in folder.iterdir() if '"asked"' in path.read_text()]
    return {(cell.model, cell.task, cell.seed): cell for cell in kept}


def test_suites_hold_what_they_say(finished):
    """Every probe of the project, the sizes that it takes, and everything else of the four suites."""
    reports, folder = finished
    found = reports["hybrid"]
    assert set(suites.names(SMALL)) == set(found.results()) == {task for _, task, _ in read(folder)}
    families = {task.split(".")[0] for task in found.results()}
    sized = {*probes()} - {"recall", "hits", "ruler"}  # two need a text, and the third is of the suite `table`
    assert families == sized | {"kv_unseen", "perplexity", "sliding"}
    assert isinstance(found.tasks["sliding"], Perplexity)
    assert [(cell.context, cell.batch) for cell in found.speed] == [(96, 1), (96, 2)]
    assert all(cell.peak_bytes > 0 and cell.prefill_milliseconds > 0 for cell in found.speed)
    assert found.speed[1].cache_bytes == 2 * found.speed[0].cache_bytes > 2 * reports["base"].speed[0].cache_bytes
    assert set(found.change) == set(found.evidence) == set(found.results())
    assert reports["base"].change == reports["base"].evidence == {}


@pytest.mark.usefixtures("in_float64")
def test_decisions_do_not_depend_on_the_batch(pair, tokenizer, tmp_path):
    wide, found = {"hybrid": copy.deepcopy(pair["hybrid"]).double()}, []
    few = {"suites": ("quick", "retrieval"), "contexts": (), "limit": 5}
    for size in (2, SMALL.batch_size):
        options = SMALL.model_copy(update={"batch_size": size, **few})
        measure(wide, tokenizer, options, cells=tmp_path / str(size))
        found.append(read(tmp_path / str(size)))
    two, many = found
    assert two.keys() == many.keys()
    for key, cell in two.items():
        other = many[key]
        assert (cell.inputs, cell.asked) == (other.inputs, other.asked), key
        np.testing.assert_allclose(cell.values, other.values, **SAME, err_msg=str(key))
        if cell.metric == "accuracy":
            assert cell.values == other.values, key


def test_processes_share_the_cells_and_a_finished_one_is_not_measured_again(pair, tokenizer, finished, tmp_path, monkeypatch):
    """Two processes, one after the other, as each would do its share; then a third, which finds everything done."""
    options = SMALL.model_copy(update={"suites": ("quick",)})

    def refuse(*_):
        raise AssertionError("a finished cell was measured again")

    module = __import__("surgery.evaluation.bench", fromlist=["share"])
    for process in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(module, "share", lambda jobs, process=process: jobs[process::2])
            patched.setattr(module, "gather", lambda mine: [_stop() for _ in mine[:1]])
            with pytest.raises(InterruptedError):
                measure(pair, tokenizer, options, cells=tmp_path)
    halves, whole = read(tmp_path), read(finished[1])
    assert halves == {key: whole[key] for key in halves}
    assert len(halves) == 2 * len(suites.names(options))
    times = written(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(asking, "answer", refuse)
        again = measure(pair, tokenizer, options, cells=tmp_path)
        assert {path: written(tmp_path)[path] for path in times} == times
        times = written(tmp_path)  # now with what was timed
        assert len(times) == len(halves) + len(options.contexts)
        assert measure(pair, tokenizer, options, cells=tmp_path)["hybrid"].cost == again["hybrid"].cost
        assert written(tmp_path) == times
        renamed = {"one": pair["base"], "other": pair["hybrid"]}
        assert measure(renamed, tokenizer, options, cells=tmp_path)["other"].kv == again["hybrid"].kv
    assert again["hybrid"].kv == finished[0]["hybrid"].kv
    lost = next(path for path in tmp_path.iterdir() if '"kv.6"' in path.read_text())
    lost.unlink()  # what a crash costs
    assert measure(pair, tokenizer, options, cells=tmp_path)["hybrid"].kv == again["hybrid"].kv
    assert {path for path, time in written(tmp_path).items() if times[path] != time} == {lost}


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def _stop():
    raise InterruptedError


def test_other_examples_are_other_cells(pair, tokenizer, tmp_path):
    few = Bench(pairs=(4,), limit=6, windows=2, window=16, contexts=())
    for seed, options in ((0, few), (1, few), (0, few.model_copy(update={"limit": 7}))):
        measure(pair, tokenizer, options, seed=seed, cells=tmp_path)
    kept = [cells.Cell.read(path) for path in tmp_path.iterdir()]
    asked = [cell.asked for cell in kept if (cell.model, cell.task) == ("base", "kv.4")]
    assert sorted(map(len, asked)) == [6, 6, 7]
    assert len({*asked}) == 3


def test_several_seeds_ask_no_example_twice(tokenizer):
    few, fixed = Bench(pairs=(4,), limit=20, seeds=3), Bench(pairs=(4,), limit=10**6, seeds=3)
    asked = [task.identity.split()[1:] for task in tasks(few, tokenizer, Data(), 5) if task.name == "knowledge"]
    assert len(asked) == 3
    assert len({digest for one in asked for digest in one}) == sum(map(len, asked)) > 40
    module = [
        task.seed for task in asking.probe_tasks("knowledge", asking.Asking("knowledge", {}), fixed, tokenizer, Data(), 5)
    ]
    assert module == [5]  # all facts are asked at once


def test_several_seeds_are_told_apart(pair, tokenizer):
    options = Bench(pairs=(4,), limit=8, seeds=2, windows=2, window=16, contexts=())
    found = measure(pair, tokenizer, options)["hybrid"]
    assert found.kv["4"].n == 16
    assert np.mean(found.seeds["kv.4"]) == pytest.approx(found.kv["4"].accuracy)


def test_a_planted_improvement_is_refused(pair, tokenizer, monkeypatch, tmp_path):
    """The answer leaks into one model's prompts; or one model's results are those of easier examples."""
    honest, options = asking.answer, Bench(pairs=(6,), limit=6, windows=2, window=16, contexts=())

    def leaky(model, tokenizer, questions, batch_size):
        if getattr(model.config, "grafts", None):
            questions = [q.__class__(f"{q.choices[q.answer]} {q.prompt}", q.choices, q.answer) for q in questions]
        return honest(model, tokenizer, questions, batch_size)

    with monkeypatch.context() as patched:
        patched.setattr(asking, "answer", leaky)
        with pytest.raises(UserError, match=r"base and hybrid were not asked the same in kv\.6: they read other tokens"):
            measure(pair, tokenizer, options)
    measure(pair, tokenizer, options, cells=tmp_path)
    for path in tmp_path.iterdir():
        cell = json.loads(path.read_text())
        if (cell.get("model"), cell.get("task")) == ("hybrid", "kv.6"):
            cells.Cell(**cell | {"asked": ["0" * 16, *cell["asked"][1:]]}).write(path)  # with a seal that fits
    with pytest.raises(UserError, match=r"not asked the same in kv\.6: example 0 differs"):
        measure(pair, tokenizer, options, cells=tmp_path)


def test_retrieval_against_the_length_of_the_prompt(pair, tokenizer, tmp_path):
    options = Bench(suites=("length",), contexts=(300, 600), limit=3)
    models = measure(pair, tokenizer, options)
    families = ("needle.300.50", "needle.600.50", "needles.300", "needles.600", "needles_asked.300", "needles_asked.600")
    assert list(models["base"].tasks) == suites.names(options) == list(families)
    assert all(result.n == 3 for result in models["base"].tasks.values())
    asked = {task.name: task.shapes() for task in suites.tasks(options, tokenizer, Data(), 0)}
    assert all(max(tokens for _, tokens in asked[name]) >= int(name.split(".")[1]) for name in families)
    made = Report.read(ROOT / "recipes" / "demo-mamba2.report.json").provenance
    report = Report(provenance=made, plan=None, models=models, timings={}, training={}, settings={})
    text = markdown.render(report)
    assert "## needles asked\n\n| tokens | 300 | 600 |" in text
    assert "![Retrieval against the length of the prompt](lengths.png)" in text
    assert [list(tasks) for tasks in needle_tasks(report.base.tasks).values()] == [[300, 600]] * 3
    report_figures.draw(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"lengths.png"} <= {*report_figures.FILES["measured"]}


def test_the_report_is_read_again_and_has_its_page(finished):
    made = Report.read(ROOT / "recipes" / "demo-mamba2.report.json").provenance
    report = Report(provenance=made, plan=None, models=finished[0], timings={}, training={}, settings={})
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert "| tokens at depth | 96 at 0% | 96 at 50% | 96 at 100% |" in markdown.render(report)


@pytest.mark.parametrize(
    ("task", "change", "fields", "words"),
    [
        ("kv.8", 0.1, {"differs": True}, "better (p = 0.01)"),
        ("perplexity", 0.1, {"differs": True}, "worse (p = 0.01)"),
        ("kv.8", 0.0, {"detectable": 0.019}, "no difference seen, and n = 9 was enough to see 2 points"),
        ("kv.8", 0.0, {"detectable": 0.043}, "no difference seen, but n = 9 shows only differences of 4.3 points or more"),
        ("kv.8", 0.0, {"detectable": None}, "no difference seen; too few examples to see a small one"),
        ("perplexity", 0.02, {"p_holm": 0.3}, "perhaps worse (p = 0.01 by itself, 0.3 among all comparisons)"),
        ("kv.8", -0.02, {"p_holm": 0.3}, "perhaps worse (p = 0.01 by itself, 0.3 among all comparisons)"),
    ],
)
def test_verdicts(task, change, fields, words):
    said = Evidence(**{"p": 0.01, "p_holm": 0.01, "differs": False, "detectable": 0.0, "n": 9} | fields)
    interval = (change / 2, 2 * change) if "p_holm" in fields else (0, 0)
    assert markdown.verdict(task, Estimate(value=change, ci95=tuple(sorted(interval)), n=9), said) == words
