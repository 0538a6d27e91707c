"""Standard tasks: the numbers of the harness's own command, and our probes as its tasks."""

import copy
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs the extra 'eval' (lm-evaluation-harness)")

from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from surgery.errors import UserError
from surgery.evaluation import suites
from surgery.evaluation.bench import measure
from surgery.evaluation.cells import Cell
from surgery.exporting.export import export
from surgery.more import TASKS, harness
from surgery.more.suites.standard import DOCUMENTS, ZEROSHOT
from surgery.probes import make, probes
from surgery.records.plan import Plan
from surgery.records.recipe import Bench, Data
from surgery.splicing.splice import splice

FORMS = {
    "local_choice": """
output_type: multiple_choice
num_fewshot: 1
fewshot_split: test
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
    (folder / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[::3]))
    (folder / "local_few.yaml").write_text(f"task: local_few{common}{FORMS['local_choice']}".replace("data.jsonl", "few.jsonl"))
    (folder / "sizes.yaml").write_text(
        "group: sizes\ntask: [local_choice, local_few]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    return folder


@pytest.fixture(scope="module")
def hybrid(tiny):
    return splice(tiny.model, Plan(sites=("L0.H3,5",)))


def test_the_numbers_are_those_of_the_command_on_the_exported_folder(tiny, hybrid, local, tmp_path, monkeypatch):
    """To the last digit, and answer by answer."""
    export(hybrid, tmp_path / "hybrid", tokenizer=tiny.tokenizer, plan=Plan(sites=("L0.H3,5",)), base="tiny")
    monkeypatch.setattr(evaluator, "add_env_info", lambda _: None)  # lists all packages, for seconds
    said = evaluator.simple_evaluate(
        "hf", f"pretrained={tmp_path / 'hybrid'}", ["sizes", "local_written"], batch_size=8, device="cpu", bootstrap_iters=0,
        task_manager=TaskManager(include_path=local, include_defaults=False),
    )  # fmt: skip
    tasks = harness.load(["sizes", "local_written"], str(local))
    every = []
    for task in (*tasks["sizes"], *tasks["local_written"]):
        name, key = task.config.task, "exact_match,strict" if task.config.task == "local_written" else "acc,none"
        scores, asked = harness.evaluate(hybrid, tiny.tokenizer, task, 8, None)
        (values,) = scores.values()
        metric, _, read = key.partition(",")
        theirs = [sample for sample in said["samples"][name] if sample["filter"] == read]
        assert values.tolist() == [sample[metric] for sample in theirs]
        assert values.mean() == said["results"][name][key]
        assert 0 < values.mean() < 1
        assert len(set(asked)) == len(theirs) == (6 if name == "local_few" else 16)
        every += [*values] if metric == "acc" else []
    assert np.mean(every) == pytest.approx(said["groups"]["sizes"]["acc,none"], rel=1e-15)  # theirs is of rounded means


def test_decisions_do_not_depend_on_the_batch(tiny, hybrid, local):
    for tasks in harness.load([*FORMS], str(local)).values():
        one, five = (harness.evaluate(hybrid, tiny.tokenizer, tasks[0], size, None) for size in (1, 5))
        assert [values.tolist() for values in one[0].values()] == [values.tolist() for values in five[0].values()]
        assert one[1] == five[1]
        assert len(one[1]) == 16


@pytest.mark.usefixtures("in_float64")
def test_only_logits_that_may_be_read_are_computed(tiny, hybrid):
    """Of tasks that score continuations, with the same scores as from all logits."""
    from lm_eval.models.huggingface import HFLM

    from surgery.more.harness_model import Ends

    hybrid = copy.deepcopy(hybrid).double()
    pairs = (("The capital of the country is", " red"), ("A dog", " and a green cat and a bird"), ("One two three", " blue"))
    asked = [("", tiny.tokenizer(text)["input_ids"], tiny.tokenizer(end)["input_ids"]) for text, end in pairs]
    asked.append(("", [5, 0, 0, 0], [0, 0]))  # the token that padding has
    scores = {}
    for kind in (HFLM, Ends):
        asker = kind(pretrained=hybrid, tokenizer=tiny.tokenizer, backend="causal", batch_size=4)
        scores[kind] = asker._loglikelihood_tokens(asked, disable_tqdm=True)
    theirs, ours = (scores[kind] for kind in (HFLM, Ends))
    assert [fits for _, fits in ours] == [fits for _, fits in theirs]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], rel=1e-9)

    long = [("", [7] * 40, [3]), ("", [9] * 38, [3, 4])]
    asker = Ends(pretrained=hybrid, tokenizer=tiny.tokenizer, backend="causal", batch_size=4)
    shapes, call = [], asker._model_call
    asker._model_call = lambda inps: shapes.append((logits := call(inps)).shape) or logits
    asker._loglikelihood_tokens(long, disable_tqdm=True)
    assert [tuple(shape[:2]) for shape in shapes] == [(2, 3)]  # of 40 places: rows of 40 and 39 tokens, continuations of 2


def test_in_a_bench(tiny, hybrid, local, tmp_path):
    """Beside other suites, with a cell for each task of a group."""
    options = Bench(suites=("language",), tasks=("sizes",), include_path=str(local), task_limit=9, windows=2, window=16)
    found = measure({"base": tiny.model, "hybrid": hybrid}, tiny.tokenizer, options, cells=tmp_path)
    assert found["hybrid"].tasks["sizes"].n == found["hybrid"].evidence["sizes"].n == 15
    assert not found["hybrid"].seeds
    kept = [Cell.read(path) for path in tmp_path.iterdir()]
    parts = {cell.part: len(cell.values) for cell in kept if (cell.model, cell.task) == ("hybrid", "sizes")}
    assert parts == {"local_choice": 9, "local_few": 6}


def test_another_definition_or_other_data_is_another_cell(local, tmp_path):
    def identity(folder, name):
        harness._load.cache_clear()
        harness._manager.cache_clear()
        return harness.identity(harness.load([name], str(folder))[name][0])

    assert len({identity(local, "local_choice") for _ in range(2)}) == 1
    whole = (local / "local_choice.yaml").read_text()
    (tmp_path / "data.jsonl").write_text((local / "data.jsonl").read_text().replace("The value", "The values"))
    changes = {
        "definition": ('"{{question}}"', '"Q: {{question}}"'),
        "examples": (str(local / "data.jsonl"), str(tmp_path / "data.jsonl")),
        "shots": ("fewshot_split: test", "fewshot_config: {samples: [{question: a, choices: [b], answer: 0}]}"),
        "other shots": ("fewshot_split: test", "fewshot_config: {samples: [{question: a, choices: [c], answer: 0}]}"),
    }
    seen = {identity(local, "local_choice")}
    for what, change in changes.items():
        assert change[0] in whole, what
        (tmp_path / "local_choice.yaml").write_text(whole.replace(*change))
        seen.add(identity(tmp_path, "local_choice"))
    assert len(seen) == 5
    shots = tmp_path / "shots.jsonl"
    apart = whole.replace("fewshot_split: test", "fewshot_split: dev").replace("{test:", f"{{dev: {shots}, test:")
    (tmp_path / "local_choice.yaml").write_text(apart)
    for lines in (slice(0, 3), slice(3, 6)):  # in a file of the same name
        shots.write_text("\n".join((local / "few.jsonl").read_text().splitlines()[lines]))
        seen.add(identity(tmp_path, "local_choice"))
    assert len(seen) == 7


def test_data_by_the_name_they_have_on_the_hub(local, tmp_path):
    """Configurations are what a README.md says, as on the Hub; without one, a task of one of them is refused. What is read is
    what is there now, and not what `datasets` has once read from a folder of that name."""
    folder, place = tmp_path / "tasks", tmp_path / "data" / "owner" / "name"
    folder.mkdir()
    place.mkdir(parents=True)
    whole = (local / "local_few.yaml").read_text()
    loaded = f"dataset_kwargs: {{data_files: {{test: {local / 'few.jsonl'}}}}}"
    assert loaded in whole
    (folder / "local_few.yaml").write_text(
        whole.replace("dataset_path: json", "dataset_path: owner/name").replace(loaded, "dataset_name: small")
    )
    with pytest.raises(UserError, match=r"cannot load the task 'local_few': .*owner/name"):
        harness.load(["local_few"], str(folder))
    shutil.copy(local / "few.jsonl", place / "few.jsonl")
    with pytest.raises(UserError, match="cannot load the task 'local_few': BuilderConfig 'small' not found"):
        harness.load(["local_few"], str(folder), str(tmp_path / "data"))
    (place / "README.md").write_text(
        "---\nconfigs:\n- {config_name: small, data_files: [{split: test, path: few.jsonl}]}\n---\n"
    )
    for step in (1, 2):
        lines = (local / "few.jsonl").read_text().splitlines()[::step]
        (place / "few.jsonl").write_text("\n".join(lines))
        harness._load.cache_clear()
        (task,) = harness.load(["local_few"], str(folder), str(tmp_path / "data"))["local_few"]
        assert [doc["question"] for doc in task.eval_docs] == [json.loads(line)["question"] for line in lines]


def test_a_group_may_give_other_data_to_tasks_of_the_harness(local, tmp_path, monkeypatch):
    """The harness's own definition, the user's files; other tasks of the group are not asked for."""

    def manager(path, own):
        return TaskManager(include_path=[*([local] if own else []), path], include_defaults=False)

    monkeypatch.setattr(harness, "_manager", manager)
    (tmp_path / "sizes.yaml").write_text(
        f"group: sizes\ntask:\n- {{task: local_choice, dataset_kwargs: {{data_files: {{test: {local / 'few.jsonl'}}}}}}}\n"
    )
    (task,) = harness.load(["sizes"], str(tmp_path))["sizes"]
    assert (task.config.task, task.OUTPUT_TYPE, len(task.eval_docs)) == ("local_choice", "multiple_choice", 6)


def test_our_probes_are_tasks_of_the_harness(tiny, hybrid):
    """With the decisions that bench makes; in one retrieval task and one of copying."""
    options = Bench(suites=("retrieval",), pairs=(8, 16), limit=10, contexts=())
    ours = {task.name: task for task in suites.tasks(options, tiny.tokenizer, Data(), 0)}
    for name in ("kv.16", "phonebook.8"):
        task = harness.load([f"surgery_{name.replace('.', '_')}"], None)
        scores, _ = harness.evaluate(hybrid, tiny.tokenizer, next(iter(task.values()))[0], 8, 10)
        assert scores["acc"].tolist() == ours[name].measure(hybrid).values.tolist()


def test_every_retrieval_probe_is_among_them():
    named = set(TaskManager(include_path=TASKS, include_defaults=False).all_tags)
    assert named == {f"surgery_{probe}" for probe in {*probes()} - {"knowledge", "letters", "recall", "hits", "ruler"}}


@pytest.mark.parametrize(
    ("names", "path", "complaint"),
    [
        (["nonsense_task"], None, "no task is named 'nonsense_task'"),
        (["local_choice"], "./nowhere", "no such folder"),
        (["broken"], "{f}", "cannot load the task 'broken'"),
        (["rolling"], "{f}", "scores running text"),
        (["whole"], "{f}", r"'whole' is scored as a whole \(f1\)"),
        (["alike"], "{f}", "the group 'alike' counts its tasks alike"),
    ],
)
def test_what_cannot_be_loaded_is_refused(local, tmp_path, monkeypatch, names, path, complaint):
    monkeypatch.setattr(harness, "_manager", lambda path, _: TaskManager(include_path=path, include_defaults=False))
    whole = (local / "local_choice.yaml").read_text()
    (tmp_path / "broken.yaml").write_text(
        whole.replace("task: local_choice", "task: broken").replace("data.jsonl", "none.jsonl")
    )
    (tmp_path / "whole.yaml").write_text(
        whole.replace("task: local_choice", "task: whole").replace(
            "metric: acc, aggregation: mean", "metric: f1, aggregation: f1"
        )
    )
    (tmp_path / "local_choice.yaml").write_text(whole)
    (tmp_path / "alike.yaml").write_text(
        "group: alike\ntask: [local_choice]\naggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
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


COMPLETED = [{"text": "Color: red. Size: 3. The size is", "value": "3"}, {"text": "Color: red. The color is", "value": "red"}]
CITED = [
    {"context": "[DOC] The owl is at the inn. The inn is big. ", "question": "The owl is at the", "answers": ["inn", "Inn"]},
    {"context": "The cat is here. The cat is", "question": "The cat is", "answers": ["here"]},
]
ANSWERED = {"question": "Where?", "choices": {"text": ["here", "there"], "label": ["A", "B"]}, "answerKey": "B"}
# Of each data set of the suites documents and zeroshot two examples of its schema, and its configuration and split.
ON_THE_HUB = {
    "hazyresearch/based-swde-v2": ("default", "validation", COMPLETED),
    "hazyresearch/based-fda": ("default", "validation", COMPLETED),
    "hazyresearch/based-squad": ("default", "validation", COMPLETED),
    **{f"hazyresearch/based_{name}": ("default", "validation", CITED) for name in ("triviaqa", "nq_2048", "drop")},
    "EleutherAI/lambada_openai": ("default", "test", [{"text": "the owl sat down"}] * 2),
    "baber/piqa": ("default", "validation", [{"goal": "eat", "sol1": "sit", "sol2": "go", "label": 0}] * 2),
    "Rowan/hellaswag": ("default", "validation", [
        {"ctx_a": "He sat.", "ctx_b": "then he", "activity_label": "Sitting", "endings": ["left", "sat"], "label": "0"}
    ] * 2),
    "allenai/winogrande": ("winogrande_xl", "validation", [
        {"sentence": "The _ sat.", "option1": "owl", "option2": "cat", "answer": "1"}
    ] * 2),
    "allenai/ai2_arc": ("ARC-Easy", "test", [ANSWERED] * 2),
}  # fmt: skip


@pytest.fixture
def on_the_hub(tmp_path):
    """A folder of them."""
    for name, (configuration, split, lines) in ON_THE_HUB.items():
        place = tmp_path / name
        place.mkdir(parents=True)
        (place / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        configurations = [configuration, *(["ARC-Challenge"] if configuration == "ARC-Easy" else [])]
        files = ", ".join(f"{{split: {each}, path: data.jsonl}}" for each in ("train", split))
        read = [f"{{config_name: {each}, data_files: [{files}]}}" for each in configurations]
        (place / "README.md").write_text(f"---\nconfigs: [{', '.join(read)}]\n---\n")
    return str(tmp_path)


def test_documents_that_the_harness_lacks(tiny, hybrid, on_the_hub):
    (task,) = harness.load(["based_triviaqa"], None, on_the_hub)["based_triviaqa"]
    docs = list(task.eval_docs)
    assert task.doc_to_text(docs[0]) == "The owl is at the inn. The inn is big. The owl is at the"
    assert task.doc_to_text(docs[1]) == "The cat is here. The cat is"
    assert [task.process_results(docs[0], [text])["contains"] for text in (" big INN.", "", "owl")] == [1.0, 0.0, 0.0]
    scores, _ = harness.evaluate(hybrid, tiny.tokenizer, task, 2, None)
    assert {*scores["contains"].tolist()} <= {0.0, 1.0}


@pytest.mark.slow  # reads all tasks of the harness; the one above reads ours
def test_documents_and_language_from_a_folder(tiny, hybrid, on_the_hub, tmp_path, monkeypatch):
    """Answer by answer as the harness's own command on the exported folder."""
    export(hybrid, tmp_path / "hybrid", tokenizer=tiny.tokenizer, plan=Plan(sites=("L0.H3,5",)), base="tiny")
    options = Bench(suites=("documents", "zeroshot"), data_path=on_the_hub, batch_size=2)
    asked = {task.name: task for task in suites.tasks(options, tiny.tokenizer, Data(), 0)}
    assert {*asked} == {*DOCUMENTS, *ZEROSHOT, "hellaswag_norm", "arc_challenge_norm"} == {*suites.names(options)}
    monkeypatch.setattr(evaluator, "add_env_info", lambda _: None)  # lists all packages, for seconds
    with harness._local(on_the_hub):
        said = evaluator.simple_evaluate(
            "hf", f"pretrained={tmp_path / 'hybrid'}", ["swde", "based_drop", "lambada_openai", "hellaswag"], batch_size=2,
            device="cpu", bootstrap_iters=0, task_manager=TaskManager(include_path=[TASKS]),
        )["samples"]  # fmt: skip
    metrics = {"swde": "contains", "based_drop": "contains", "lambada_openai": "acc", "hellaswag": "acc"}
    for name, metric in metrics.items():
        assert asked[name].measure(hybrid).values.tolist() == [sample[metric] for sample in said[name]]
    normed = [sample["acc_norm"] for sample in said["hellaswag"]]
    assert asked["hellaswag_norm"].measure(hybrid).values.tolist() == normed
