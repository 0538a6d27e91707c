"""Every verb on hostile inputs, under an audit hook of Python, fresh processes included: no code of a stranger's runs, and no
process starts and no connection is tried but those that are named here and in the page "What it touches and what it runs"."""

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pytest

from surgery.families.mamba2 import Mamba2HybridForCausalLM
from surgery.hybrids.sources import sources
from surgery.kernels import native
from tests.models import ROOT, VOCABULARY, random_base

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the names here have characters that other systems refuse")

NAME = "mo'd\"el\t+$(touch ran)`touch ran`\\n\n;#"
EVIL = "open({!r}, 'a').write(__file__ + chr(10))\n"
MAP = {
    "AutoConfig": "who/repo--mod.Config", "AutoModelForCausalLM": "modeling_evil.Model", "AutoModel": "who/repo--mod.Model",
    "AutoTokenizer": ["who/repo--mod.Words", "tokenization_evil.Words"],
}  # fmt: skip
MODULES = (
    "modeling_evil.py", "tokenization_evil.py", "configuration_mamba2.py", "mamba2_hybrid.py", "ssm_model.py", "torch.py",
    "yaml.py", "json.py", "sitecustomize.py", "custom_generate/generate.py", "kernels.py", "surgery/__init__.py", "conftest.py",
)  # fmt: skip
RECIPE = """
locate: {options: {pairs: 4}, examples: 4, batch_size: 4}
plan: {heads: 1}
tune: {steps: 2, batch_size: 1, lessons: [{options: {pairs: [2, 4]}, queries: 2}], text_batch_size: 1, text_tokens: 24}
bench: {pairs: [4], limit: 4, windows: 2, window: 32, contexts: [16], controls: false}
"""
PRETRAINING = """
architecture: {model_type: mamba2, hidden_size: 32, num_hidden_layers: 2, num_heads: 4, head_dim: 16, state_size: 8,
               n_groups: 1, chunk_size: 16, tie_word_embeddings: true}
seed: 0
first_layer_steps: 1
steps: 1
curriculum: {first: 2, last: 3, threshold: 0.5}
kv_targets: 4
text_sequences: 1
letter_sequences: 1
examples: 2
"""
TASKS = {
    "evil.yaml": "task: evil\ndataset_path: json\ndoc_to_text: !function modeling_evil.run\ndoc_to_target: a\n",
    "include.yaml": "include: ../elsewhere.txt\ntask: included\n",
}
ENVIRONMENT = ("AUDIT", "PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS", "VIRTUAL_ENV", "CC", "LD_LIBRARY_PATH")

# What the verbs may start. Nothing else of this process's children is a program of Python.
FRESH = "a process that reads an export back"
COMPILER = "the C compiler, for kernels"
FONTS = "fc-list, by matplotlib, which looks for fonts"
STARTS = {
    "doctor": {COMPILER}, "doctor of a model": set(), "locate": {COMPILER, FONTS}, "plan": set(),
    "splice": {FRESH, COMPILER, FONTS}, "tune": {FRESH, COMPILER, FONTS},
    "tune --dry-run": {COMPILER}, "bench": {COMPILER, FONTS}, "export": {FRESH, COMPILER, FONTS},
    "run": {FRESH, COMPILER, FONTS}, "run --dry-run": {COMPILER, FONTS}, "prune": {COMPILER},
    "pretrain": {COMPILER}, "publish": {FONTS},
}  # fmt: skip


class Event(NamedTuple):
    call: str
    process: int
    kind: str
    what: str
    more: str


@pytest.fixture
def place(tmp_path_factory, tokenizer) -> Path:
    """The folder of a stranger: a base, tasks and recipes, with modules lying about that leave a mark."""
    place = tmp_path_factory.mktemp("audit")
    model = place / "work" / NAME
    random_base(vocab_size=VOCABULARY).save_pretrained(model)
    tokenizer.save_pretrained(model)
    make_hostile(model, modules(place), SETTINGS)
    for folder in ("tasks", "."):
        make_hostile(place / "work" / folder, modules(place), {})
    for name, text in TASKS.items():
        (place / "work" / "tasks" / name).write_text(text)
    (place / "work" / "elsewhere.txt").write_text(TASKS["evil.yaml"])
    engine = place / "work" / "engine"
    engine.write_text(f"#!/bin/sh\ntouch {place}/ran\n")
    engine.chmod(0o755)
    (place / "work" / "matplotlibrc").write_text("backend: module://modeling_evil\n")
    named = json.dumps(NAME)
    recipes = {
        "quick": f"model: {named}\n{RECIPE}", "pretraining": PRETRAINING,
        "engine": f"model: {named}\nbench: {{suites: [serving], engine_python: ./engine}}\n",
        "tasks": f"model: {named}\nbench: {{tasks: [evil], include_path: tasks}}\n",
        "included": f"model: {named}\nbench: {{tasks: [included], include_path: tasks}}\n",
        "trusting": f"model: {named}\ntrust_remote_code: true\n",
        "tagged": f"model: !!python/object/apply:os.system ['touch {place}/ran']\n",
    }  # fmt: skip
    for name, text in recipes.items():
        (place / "work" / f"{name}.yaml").write_text(text)
    (place / "work" / "evil plan.json").write_text(
        json.dumps({"sites": ["L0.H1"], "donor": "__import__('os').system('touch ran')"})
    )
    hook = place / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(Path(__file__).with_name("audit_hook.py").read_text())
    return place


def make_hostile(folder: Path, texts: dict[str, str], settings: dict[str, dict]) -> None:
    """Done here, and by the driver to what it has written."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, more in settings.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | more))


SETTINGS = {
    "config.json": {"auto_map": MAP},  # a field that no family knows is refused there
    "tokenizer_config.json": {"auto_map": MAP, "trust_remote_code": True},
    "generation_config.json": {"auto_map": MAP, "trust_remote_code": True},
}


def modules(place: Path) -> dict[str, str]:
    """Modules that would leave a mark, with names that somebody may import."""
    return dict.fromkeys(MODULES, EVIL.format(str(place / "ran")))


DRIVER = f"""
import json, os, sys
from pathlib import Path
{inspect.getsource(make_hostile)}
calls = json.loads(sys.argv[1])
LOG = os.open(os.environ["AUDIT"], os.O_WRONLY | os.O_APPEND)
from surgery.cli.app import main
from surgery.exporting import verify
from surgery.models.answers import load_and_answer
def here(_, folders, new):
    return [load_and_answer(folder, how, new) for folder, how in folders.items()]
results = {{}}
for name, arguments in calls.items():
    if name.startswith("hostile: "):
        make_hostile(Path(name.removeprefix("hostile: ")), *arguments)
        continue
    if name == "read back here":
        verify.ask = here
        continue
    os.write(LOG, (json.dumps([os.getpid(), "call", name]) + "\\n").encode())
    sys.argv = ["surgery", *arguments]
    try:
        main()
        results[name] = 0
    except SystemExit as stop:
        results[name] = stop.code or 0
    except BaseException as error:
        results[name] = f"{{type(error).__name__}}: {{error}}"
os.write(LOG, (json.dumps([os.getpid(), "results", json.dumps(results)]) + "\\n").encode())
"""


def called(place: Path, calls: dict[str, list]) -> tuple[dict[str, int], list[Event], str]:
    """The statuses of calls of the command line, one after the other in one process, all that it and its children did, and
    what it said."""
    log = place / "log"
    log.write_text("")
    home, kernels = place / "home", native._cache()
    home.mkdir()
    if kernels.is_dir():  # all but one of the kernels are compiled
        shutil.copytree(kernels, home / "cache" / "surgery", ignore=shutil.ignore_patterns("divergence-*"))
    shutil.copytree(matplotlib.get_cachedir(), home / "cache" / "matplotlib")  # the fonts, which take seconds to find
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {
        "AUDIT": str(log), "PYTHONPATH": f"{place / 'hook'}:{ROOT}", "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-c", DRIVER, json.dumps(calls)], cwd=place / "work", env=environment, capture_output=True,
        text=True, check=False, input="y\n" * 99, timeout=580,
    )  # fmt: skip
    events, call, results = [], "", {}
    for line in log.read_text().splitlines():
        process, kind, what, *more = json.loads(line)
        if kind == "call":
            call = what
        elif kind == "results":
            results = json.loads(what)
        elif call:
            events.append(Event(call, process, kind, what, *more, *[""] * (1 - len(more))))
    assert results.keys() == {name for name in calls if not name.startswith(("hostile: ", "read back"))}, done.stderr[-3000:]
    return results, events, done.stdout + done.stderr


FOLDERS = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), ROOT / "surgery", ROOT / "kernels"]
OURS = tuple(os.path.realpath(folder) + os.sep for folder in FOLDERS)


@cache
def ours(path: str) -> bool:
    """A file of the package, of what it depends on, of Python's own library, or of the driver."""
    return os.path.realpath(path).startswith(OURS)


def violations(events: list[Event], place: Path) -> Iterator[str]:
    """What nobody has consented to."""
    exported = {hashlib.sha256(text.encode()).hexdigest() for text in sources(Mamba2HybridForCausalLM).values()}
    exported.add(hashlib.sha256(b"").hexdigest())  # the __init__.py of a package
    for event in events:
        call, _, kind, what, more = event
        if kind == "exec":
            if what.startswith("<") or not os.path.isabs(what):  # text: by whom?
                package = any(Path(more).is_relative_to(ROOT / name) for name in ("surgery", "kernels"))
                good = (what == "<string>" and not more) or (ours(more) and not package)  # the driver's, or a library's
            else:
                good = ours(what) or (bool(more) and more in exported) or what == str(place / "hook" / "sitecustomize.py")
        elif kind == "import":
            good = ours(what)
        elif kind == "ctypes.dlopen":
            good = what == "None" or "/" not in what or ours(what) or kernel(what, place)
        elif kind == "subprocess.Popen":
            good = started(event) in STARTS.get(call.partition(" of ")[0], set()) | STARTS.get(call, set())
        elif kind == "pickle.find_class":
            good = what.partition(".")[0] in (
                "torch",
                "collections",
                "numpy",
                "builtins",
                "accelerate",
                "surgery",
                "tokenizers",
            )
        else:
            good = False
        if not good:
            yield f"{call}: {kind} {what} {more}"


def kernel(path: str, place: Path) -> bool:
    """A library that was compiled here: in the cache, or in a folder that goes when it is loaded."""
    return Path(path).is_relative_to(place / "home" / "cache" / "surgery")


def started(event: Event) -> str:
    """Which of those that are named a process is, or its command."""
    program, command = os.path.basename(event.what), json.loads(event.more)
    if isinstance(command, list):
        if event.what == sys.executable and command[1:3] == ["-P", str(ROOT / "surgery" / "models" / "answers.py")]:
            return FRESH
        if program == os.path.basename(os.environ.get("CC", "cc").split()[0]) and {"-dM", "-shared"} & {*command}:
            return COMPILER
        if program == "fc-list":
            return FONTS
    return event.more


def refused(name: str) -> list[str]:
    return ["run", f"{name}.yaml", "--dry-run"]


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "everything"])
def test_no_verb_runs_what_it_was_not_told_to(place, everything):
    """The quick one leaves out a whole run, which is the other verbs, and starts one fresh process: what is exported later is
    read back by the same lines in the process of the verb, which is heard as well."""
    quick = ["--recipe", "quick.yaml"]
    out = {name: f"out of {NAME} {name}" for name in ("located", "spliced", "tuned", "bench", "pruned", "run")}
    hybrid = out["spliced"]
    calls = {
        "doctor": ["doctor"],
        "doctor of a model": ["doctor", NAME],
        "locate": ["locate", NAME, *quick, "--out", out["located"]],
        "plan": ["plan", f"{out['located']}/ranking.json", "--out", "plan.json", "--set", "plan.sites=L1.H3"],
        "splice": ["splice", NAME, "plan.json", "--out", out["spliced"], "--verify", "tensors"],
        "splice of an evil plan": ["splice", NAME, "evil plan.json", "--out", "never"],
        **({} if everything else {"read back here": []}),
        "prune": ["prune", NAME, *quick, "--out", out["pruned"]],
        **({"run": ["run", "quick.yaml", "--out", out["run"], "--verify", "tensors"]} if everything else {}),
        "run --dry-run": ["run", "quick.yaml", "--dry-run"],
        "pretrain": ["pretrain", "pretraining.yaml", "--out", "pretrained"],
        "publish": ["publish", out["spliced"], "who/repo", "--dry-run"],
        **{f"run of {name}": refused(name) for name in ("engine", "tasks", "included", "trusting", "tagged")},
        "settings": ["settings"], "list": ["list", "suites"], "report-schema": ["report-schema"], "tasks-path": ["tasks-path"],
        # A stranger's hybrid: what the calls above have written, made hostile.
        f"hostile: {hybrid}": [modules(place), SETTINGS],
        "tune --dry-run": ["tune", hybrid, *quick, "--out", "x", "--dry-run"],
        "tune": ["tune", hybrid, *quick, "--out", out["tuned"], "--verify", "tensors"],
        "bench": ["bench", NAME, hybrid, *quick, "--out", out["bench"]],
        "export": ["export", hybrid, "--format", "patch", "--out", f"patch {NAME}"],
    }  # fmt: skip
    results, events, said = called(place, calls)
    wrong = {"splice of an evil plan", *(f"run of {name}" for name in ("engine", "tasks", "included", "trusting", "tagged"))}
    assert {name for name, status in results.items() if status != 0} == wrong, said[-6000:]
    assert all(results[name] == 2 for name in wrong), said[-6000:]
    found = list(violations(events, place))
    fresh = [event for event in events if event.kind == "subprocess.Popen" and started(event) == FRESH]
    assert [event.call for event in fresh] == (["splice", "run", "tune", "export"] if everything else ["splice"])
    assert len({event.process for event in events}) == 1 + len(fresh)  # those were heard, too
    assert not (place / "ran").exists(), (place / "ran").read_text()
    assert not list((place / "work").rglob("ran"))
    assert not found, "\n".join(sorted({*found}))
    config = json.loads((place / "work" / out["tuned"] / "config.json").read_text())
    assert config["auto_map"].keys() == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert not any("--" in value for value in config["auto_map"].values())
    assert "auto_map" not in json.loads((place / "work" / out["tuned"] / "tokenizer_config.json").read_text())


def test_the_hook_hears_what_a_stranger_would_do(place):
    """Or the test above could not fail."""
    module = place / "work" / "modeling_evil.py"
    evil = [
        f"import runpy; runpy.run_path({str(module)!r})", "exec('1')", "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])", "import socket; socket.create_connection(('localhost', 9))",
        "import ctypes; ctypes.CDLL('/lib/evil.so')", "input('run the custom code? [y/N]')",
    ]  # fmt: skip
    driver = "import json, os\nos.write(os.open(os.environ['AUDIT'], 1 | os.O_APPEND), b'[0, \"call\", \"locate\"]\\n')\n"
    for text in evil:
        (place / "log").write_text("")
        environment = {"AUDIT": str(place / "log"), "PYTHONPATH": str(place / "hook"), "PATH": os.environ["PATH"]}
        subprocess.run([sys.executable, "-c", driver + text], env=environment, capture_output=True, check=False, input=b"y\n")
        lines = [json.loads(line) for line in (place / "log").read_text().splitlines()]
        after = lines[next(i for i, line in enumerate(lines) if line[1] == "call") + 1 :]
        events = [Event("locate", *line[:3], *line[3:4], *[""] * (4 - len(line))) for line in after]
        assert list(violations(events, place)), text
    (place / "ran").unlink()
