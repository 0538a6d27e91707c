"""Nothing of a stranger's runs unless the person at the command line says so."""

import json
import os
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import surgery
from surgery.errors import UserError
from surgery.exporting.export import export
from surgery.kernels import native
from surgery.more import harness
from surgery.more.task_code import check_task_code, without_task_code
from surgery.records.plan import Plan
from surgery.runtime.consent import consent, consenting
from surgery.splicing.splice import splice
from tests.models import VOCABULARY, random_base

PLAN = Plan(sites=("L1.H3",))
STRANGE = {
    "AutoConfig": "who/repo--mod.Config", "AutoModelForCausalLM": "who/repo--mod.Model", "AutoModel": "evil.Model",
    "AutoTokenizer": ["who/repo--mod.Words", None],
}  # fmt: skip
EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Config: ...\nclass Model: ...\n"


@pytest.fixture(scope="module")
def strange(tmp_path_factory, tokenizer):
    """A stranger's hybrid, whose configurations name code of the Hub and code beside them. Do not change it."""
    folder = tmp_path_factory.mktemp("a stranger's") / "strange"
    export(splice(random_base(vocab_size=VOCABULARY), PLAN), folder, tokenizer=tokenizer, plan=PLAN, base="b")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": STRANGE}))
    (folder / "evil.py").write_text(EVIL)
    return folder


@pytest.mark.parametrize("form", ["hf", "save_pretrained"])
def test_a_strangers_code_is_not_in_what_is_written(strange, tmp_path, form):
    """Nor does it run on the way."""
    opened = surgery.load(strange)
    out = tmp_path / "out"
    if form == "hf":
        export(opened, out, base="b", plan=PLAN)
    else:
        opened.model.save_pretrained(out, tokenizer=opened.tokenizer)
    for file in out.rglob("*.json"):
        assert "--" not in file.read_text().replace("<--", ""), file.name
    own = json.loads((out / "config.json").read_text())["auto_map"]
    assert own == {
        "AutoConfig": "mamba2_hybrid.Mamba2HybridConfig", "AutoModel": "mamba2_hybrid.Mamba2HybridModel",
        "AutoModelForCausalLM": "mamba2_hybrid.Mamba2HybridForCausalLM",
    }  # fmt: skip
    assert "auto_map" not in json.loads((out / "tokenizer_config.json").read_text())
    assert not (out / "evil.py").exists()
    assert not (strange / "ran").exists()
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "mamba2_hybrid"


NAMES = ['x"+str(__import__("os").system("touch ran"))+"', "a\nb\tit's back\\slash, $(touch ran) ü 北", "-o"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_may_have_any_name(tokenizer, tmp_path, monkeypatch, name):
    """It stands in the card as text. How it travels to a fresh process is in test_audit.py."""
    monkeypatch.chdir(tmp_path)
    hybrid = splice(random_base(vocab_size=VOCABULARY), PLAN)
    export(hybrid, tmp_path / name, tokenizer=tokenizer, plan=PLAN, base="b", verify="tensors")
    assert sorted(os.listdir(tmp_path)) == [name]
    card = (tmp_path / name / "README.md").read_text()
    (code,) = card.split("```python\n")[1:]
    assert f"from_pretrained({json.dumps(name, ensure_ascii=False)}" in code.split("```")[0]


@pytest.mark.parametrize(
    "text",
    [
        "task: t\ndoc_to_text: !function evil.run\n", "task: t\nclass: !function evil.Model\n", "include: sub/../other.txt\n",
        "task: t\ndataset_path: pandas\n", "task: !!python/object/apply:os.system ['touch ran']\n",
    ],
)  # fmt: skip
def test_tasks_with_code_are_refused_before_any_of_it_runs(tmp_path, text):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "evil.py").write_text(EVIL)
    (tmp_path / "tasks" / "sub").mkdir()
    (tmp_path / "tasks" / "other.txt").write_text("task: t\ndoc_to_text: !function evil.run\n")
    (tmp_path / "tasks" / "t.yaml").write_text(text)
    with pytest.raises(UserError, match="--trust-task-code"):
        harness.load(["t"], str(tmp_path / "tasks"))
    assert not (tmp_path / "tasks" / "ran").exists()
    with consenting(task_code=True):
        check_task_code(str(tmp_path / "tasks"))
    assert not consent().task_code


TASK = """task: t
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_target: a
doc_to_choice: c
doc_to_text: q
"""
FUNCTION = "process_docs: !function evil.run\n"


@pytest.mark.parametrize(
    ("name", "text", "encoding"),
    [
        ("t.yaml", FUNCTION, "utf-16"),  # which YAML reads, by the bytes that it begins with
        (".yaml", FUNCTION, "utf-8"),  # a name without a suffix
        ("t.yaml", "metric_list: [{metric: ./evil.py, aggregation: mean, higher_is_better: true}]\n", "utf-8"),
        ("t.yaml", "metric_list: [{metric: evil, hf_evaluate: true, aggregation: mean, higher_is_better: true}]\n", "utf-8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("looked", [True, False], ids=["files", "where it would run"])
def test_code_of_tasks_is_found_however_it_is_written(tmp_path, monkeypatch, name, text, encoding, looked):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"q": "a", "c": ["x", "y"], "a": 0}\n')
    for place in (tmp_path / "tasks", tmp_path, tmp_path / "evil"):
        place.mkdir(exist_ok=True)
        (place / "evil.py").write_text(EVIL + "def run(docs): return docs\n")
    (tmp_path / "tasks" / name).write_text(TASK + text, encoding=encoding)
    if not looked:  # as if the files had told nothing
        monkeypatch.setattr(harness, "check_task_code", lambda folder: None)
    with pytest.raises(UserError, match="--trust-task-code"):
        harness.load(["t"], str(tmp_path / "tasks"))
    assert not list(tmp_path.rglob("ran"))


def test_templates_of_tasks_reach_no_python(tmp_path):
    utils = pytest.importorskip("lm_eval.utils", reason="lm_eval is not installed")
    evil = f"{{{{ cycler.__init__.__globals__.os.system('touch {tmp_path}/ran') }}}}"
    with without_task_code(), pytest.raises(Exception, match="unsafe"):
        utils.apply_template(evil, {})
    assert not (tmp_path / "ran").exists()
    with without_task_code():
        assert utils.apply_template("{{a|regex_replace('x', 'y')}} {{b[0]}}", {"a": "xx", "b": [1]}) == "yy 1"


@pytest.mark.skipif(sys.platform != "linux", reason="modes are of Unix")
def test_a_kernel_of_our_own_is_taken_again_whatever_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old = os.umask(0o002)
    try:
        native.load.cache_clear()
        native.load("divergence")
    finally:
        os.umask(old)
    (library,) = (tmp_path / "surgery").glob("divergence-*.so")
    loaded = []
    monkeypatch.setattr(native.ctypes, "CDLL", loaded.append)
    native.load.cache_clear()
    native.load("divergence")
    native.load.cache_clear()
    assert loaded == [str(library)]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can give files away")
def test_a_kernel_that_others_may_have_written_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load.cache_clear()
    native.load("divergence")
    folder, loaded = tmp_path / "surgery", []
    (library,) = folder.glob("divergence-*.so")
    monkeypatch.setattr(native.ctypes, "CDLL", loaded.append)
    for whose in ("folder", "library", "writable"):
        library.unlink()  # the one that is loaded stays as it is: written over, it would end this process with a bus error
        library.write_bytes(b"what somebody else put there")
        if whose == "writable":
            folder.chmod(0o777)
        else:
            os.chown(library if whose == "library" else folder, 65534, 65534)
        native.load.cache_clear()
        native.load("divergence")
        assert loaded, whose
        assert all(Path(path) != library for path in loaded), whose
        assert library.read_bytes() == b"what somebody else put there"
        os.chown(library, 0, 0)
        os.chown(folder, 0, 0)
        loaded.clear()
    native.load.cache_clear()
