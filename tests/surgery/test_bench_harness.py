"""Standard tasks: the numbers of the harness's own command, and our probes as its tasks."""

import json

import pytest

pytest.importorskip("lm_eval", reason="needs the extra 'eval' (lm-evaluation-harness)")

from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from surgery.bench import bench, harness, suites
from surgery.errors import UserError
from surgery.export import export
from surgery.plan import Plan
from surgery.probes import make, probes
from surgery.recipe import Bench, Data
from surgery.splice import splice

FORMS = {
    "local_choice": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "local_written": """
output_type: generate_until
doc_to_target: "{{choices[answer] | trim}}"
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 2}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]
filter_list:
  - {name: strict, filter: [{function: regex, regex_pattern: "(^[0-9]{1,2}|^ [A-Za-z]+)"}, {function: take_first}]}
  - {name: loose, filter: [{function: take_first}]}
""",
}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A folder of tasks whose data lie beside them: half of it retrieval, half knowledge."""
    folder = tmp_path_factory.mktemp("tasks")
    asked = [*make("kv", pairs=12).questions(8, 0), *make("knowledge").questions(8, 0)]
    lines = [{"question": q.prompt, "choices": list(q.choices), "answer": q.answer} for q in asked]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "data.jsonl"}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
    for name, form in FORMS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}{common}{form}")
    (folder / "both.yaml").write_text("group: both\ntask: [local_choice, local_written]\n")
    return folder


@pytest.fixture(scope="module")
def hybrid(tiny):
    return splice(tiny.model, Plan(sites=("L0.H3,5",)))


def test_the_numbers_are_those_of_the_command_on_the_exported_folder(tiny, hybrid, local, tmp_path, monkeypatch):
    """To the last digit, and answer by answer."""
    export(hybrid, tmp_path / "hybrid", tokenizer=tiny.tokenizer, plan=Plan(sites=("L0.H3,5",)), base="tiny")
    monkeypatch.setattr(evaluator, "add_env_info", lambda _: None)  # lists all packages, for seconds
    said = evaluator.simple_evaluate(
        "hf", f"pretrained={tmp_path / 'hybrid'}", [*FORMS], batch_size=8, device="cpu", bootstrap_iters=0,
        task_manager=TaskManager(include_path=local, include_defaults=False),
    )  # fmt: skip
    tasks = harness.load([*FORMS], str(local))
    for name, key in (("local_choice", "acc,none"), ("local_written", "exact_match,strict")):
        values, asked = harness.evaluate(hybrid, tiny.tokenizer, tasks[name], 8, None)
        theirs = [sample[key.split(",")[0]] for sample in said["samples"][name] if sample["filter"] == key.split(",")[1]]
        assert values.tolist() == theirs
        assert values.mean() == said["results"][name][key]
        assert 0 < values.mean() < 1
        assert len(set(asked)) == 16


def test_decisions_do_not_depend_on_the_batch(tiny, hybrid, local):
    tasks = harness.load(["both"], str(local))["both"]
    one, eight = (harness.evaluate(hybrid, tiny.tokenizer, tasks, size, None) for size in (1, 8))
    assert one[0].tolist() == eight[0].tolist()
    assert one[1] == eight[1]
    assert len(one[0]) == 32


def test_in_a_bench(tiny, hybrid, local, tmp_path):
    """Beside other suites; another definition or other data is another cell."""
    options = Bench(suites=("language",), tasks=("local_choice",), tasks_path=str(local), task_examples=6, windows=2, window=16)
    found = bench({"base": tiny.model, "hybrid": hybrid}, tiny.tokenizer, options, cells=tmp_path)
    assert found["hybrid"].tasks["local_choice"].n == found["hybrid"].evidence["local_choice"].n == 6
    before = harness.identity(harness.load(["local_choice"], str(local))["local_choice"])
    harness._manager.cache_clear()
    assert harness.identity(harness.load(["local_choice"], str(local))["local_choice"]) == before
    other = tmp_path / "local_choice.yaml"
    other.write_text((local / "local_choice.yaml").read_text().replace('"{{question}}"', '"Q: {{question}}"'))
    assert harness.identity(harness.load(["local_choice"], str(tmp_path))["local_choice"]) != before


def test_our_probes_are_tasks_of_the_harness(tiny, hybrid):
    """With the decisions that bench makes; in one retrieval task and one of copying."""
    options = Bench(suites=("retrieval",), pairs=(8, 16), examples=10, contexts=())
    ours = {task.name: task for task in suites.tasks(options, tiny.tokenizer, Data(), 0)}
    for name in ("kv.16", "phonebook.8"):
        task = harness.load([f"surgery_{name.replace('.', '_')}"], None)
        values, _ = harness.evaluate(hybrid, tiny.tokenizer, next(iter(task.values())), 8, 10)
        assert values.tolist() == ours[name].measure(hybrid).values.tolist()


def test_every_retrieval_probe_is_among_them():
    named = set(TaskManager(include_path=harness.TASKS, include_defaults=False).all_tags)
    assert named == {f"surgery_{probe}" for probe in {*probes()} - {"knowledge", "letters"}}


@pytest.mark.parametrize(
    ("names", "path", "complaint"),
    [
        (["nonsense_task"], None, "no task is named 'nonsense_task'"),
        (["local_choice"], "./nowhere", "no such folder"),
        (["broken"], "{f}", "cannot load the task 'broken'"),
        (["rolling"], "{f}", "scores running text"),
    ],
)
def test_what_cannot_be_loaded_is_refused(local, tmp_path, monkeypatch, names, path, complaint):
    monkeypatch.setattr(harness, "_manager", lambda path, _: TaskManager(include_path=path, include_defaults=False))
    whole = (local / "local_choice.yaml").read_text()
    (tmp_path / "broken.yaml").write_text(
        whole.replace("task: local_choice", "task: broken").replace("data.jsonl", "none.jsonl")
    )
    rolling = "task: rolling\n" + whole.split("\n", 1)[1].split("doc_to_text")[0]
    (tmp_path / "rolling.yaml").write_text(
        f"{rolling}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{question}}}}'\n"
        "metric_list: [{metric: word_perplexity}]\n"
    )
    with pytest.raises(UserError, match=complaint):
        harness.load(names, path and path.format(f=tmp_path))


def test_without_the_harness_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'mamba-surgery\[eval\]'"):
        suites.tasks(Bench(suites=("knowledge",)), None, Data(), 0)
