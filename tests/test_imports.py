"""How the package is imported: quickly, in any order, every module as it is written, and from the bottom to the top."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import surgery
from surgery.cli.app import VERBS
from tools.startup import COMMANDS, Startup, measure, slower

ROOT = Path(__file__).parent.parent

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
ROW = re.compile(r"^\| (`\w+/`(?:, `\w+/`)*) \|", re.MULTILINE)
BELOW = ("errors", "statistics")  # files beside the folders, which any of them may read; errors imports nothing


def folders(heading: str) -> list[set[str]]:
    """The rows of the table of packages under a heading of docs/architecture.md, from the bottom to the top."""
    part = ARCHITECTURE.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    return [set(re.findall(r"`(\w+)/`", row)) for row in ROW.findall(part)]


CORE, AROUND = folders("The core"), folders("Around it")


@cache
def modules() -> dict[str, Path]:
    """Name -> file of every module of the package; kernels/ is a symbolic link."""
    files = [Path(folder, name) for folder, _, names in os.walk(ROOT / "surgery", followlinks=True) for name in names]
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files if file.suffix == ".py"}
    named = {".".join(part for part in names if part != "__init__"): file for file, names in parts.items()}
    return {name: file for name, file in named.items() if file.name != "dataset.py"}  # read by the harness, as a file


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports() -> dict[str, set[str]]:
    """Module -> those of ours that it imports, anywhere in it."""
    files = modules()
    graph = {}
    for name, file in files.items():
        graph[name] = set()
        for node in ast.walk(tree(file)):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.level == 0, f"{name}: a relative import"
                found = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [full if full in files else node.module for full in found]
            graph[name] |= {other for other in found if other in files and other != name}
    graph["surgery"] = set()  # of names that are looked up when they are used
    return graph


def hidden_names(module: str) -> set[str]:
    """What a module takes of other packages' private names."""
    nodes = [node for node in ast.walk(tree(modules()[module])) if isinstance(node, ast.ImportFrom)]
    others = [
        node for node in nodes if (node.module or "").startswith("surgery.") and package(node.module or "") != package(module)
    ]
    return {alias.name for node in others for alias in node.names if alias.name.startswith("_")}


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_module_is_imported_as_it_is_written():
    """`import surgery.X.Y as z`: no function may stand where a module is to be found."""
    for name in modules():
        parent, _, own = name.rpartition(".")
        if parent and not own.startswith("vllm_"):  # of a serving engine's environment
            importlib.import_module(name)
            assert getattr(sys.modules[parent], own) is sys.modules[name], name
    assert not set(surgery.__all__) & {name.split(".")[1] for name in modules() if "." in name}


def test_every_package_has_its_row_in_the_architecture():
    there = {package(name) for name in modules()} - {"", "__main__", *BELOW}
    rows = [*CORE, *AROUND]
    assert sorted(name for row in rows for name in row) == sorted(there), "each once"


def test_imports_go_one_way():
    """In the order of docs/architecture.md: a package imports from its own row and from those before it."""
    row = {name: number for number, names in enumerate([*CORE, *AROUND]) for name in names} | dict.fromkeys(BELOW, -1)
    upwards = {
        (name, other)
        for name, others in imports().items()
        for other in others
        if package(name) not in ("", "__main__", *BELOW) and row.get(package(other), 99) > row[package(name)]
    }
    assert upwards == {("surgery.models.answers", "surgery")}, "a script, for a process of its own"


def test_the_core_imports_nothing_that_stands_around_it():
    """And what does, of the core alone, by public names; the command line, the last row, has all of it."""
    core, around = set().union(*CORE, BELOW), set().union(*AROUND[:-1])
    crossing = {
        (package(name), package(other))
        for name, others in imports().items()
        for other in others
        if package(other) in around and package(name) in core | around - {package(other)}
    }
    expected = {
        ("studies", "figures"): "how figures look",
        ("more", "figures"): "the same, of a table's",
        ("studies", "pretraining"): "to make their own bases",
        ("studies", "more"): "oracles",
        ("studies", "costs"): "a run that says what it will cost",
        ("commands", "costs"): "the same, and of a bench",
    }
    assert crossing == expected.keys()
    private = {name: names for name in modules() if package(name) in around if (names := hidden_names(name))}
    assert private == {}


def test_no_files_import_each_other_in_a_circle():
    left = dict(imports())
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert {name: others & left.keys() for name, others in left.items()} == {}


def test_type_checkers_see_what_is_resolved_when_it_is_used():
    tree = ast.parse(Path(surgery.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module.removeprefix("surgery.")
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == surgery._MODULES
    assert set(surgery.__all__) == {*seen, "UserError"} <= set(dir(surgery))
    for name in surgery.__all__:
        assert getattr(surgery, name).__name__ == name
    assert surgery.__version__
    assert surgery.__getattr__("probes") is sys.modules["surgery.probes"]
    with pytest.raises(AttributeError, match="has no attribute 'splize'"):
        _ = surgery.splize


def fresh(program: str) -> list:
    """What a program prints as JSON in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


HEAVY = ("torch", "transformers", "accelerate", "peft", "datasets", "pandas", "matplotlib", "scipy", "numpy", "jinja2")
START = f"""
import contextlib, io, json, sys
import surgery
report = [["import surgery", 0, "", [name for name in {HEAVY} if name in sys.modules]]]
from surgery.cli.app import main
for arguments in json.loads(sys.argv[1] if len(sys.argv) > 1 else '''ARGUMENTS'''):
    sys.argv = ["surgery", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    report.append([" ".join(arguments), status, out.getvalue(), [name for name in {HEAVY} if name in sys.modules]])
print(json.dumps(report))
"""


def test_help_version_and_a_typo_import_nothing_heavy():
    calls = [["--help"], ["--version"], [], ["lcoate"], ["locate"], ["locate", "x", "--stes", "y"]]
    calls += [[verb, "--help"] for verb in VERBS]
    report = {called: rest for called, *rest in fresh(START.replace("ARGUMENTS", json.dumps(calls)))}
    assert {called: modules for called, (_, _, modules) in report.items() if modules} == {}
    assert all(report[f"{verb} --help"][0] == 0 for verb in VERBS)
    assert report["--version"][:2] == [0, f"mamba-surgery {surgery.__version__}\n"]
    for called, words in {
        "lcoate": "Did you mean 'locate'?", "locate": "Missing argument", "locate x --stes y": "Possible options: --set"
    }.items():  # fmt: skip
        status, printed, _ = report[called]
        assert status == 2
        assert words in printed
    assert all(verb in report["--help"][1] for verb in VERBS)
    assert "bench.suites=" in report["bench --help"][1]


USE = """
import json, sys
from transformers import AutoConfig
sizes = dict(num_heads=2, head_dim=4, hidden_size=4, state_size=4, num_hidden_layers=1, vocab_size=8, n_groups=1)
config = AutoConfig.for_model("mamba2_hybrid", **sizes)
answers = [type(config).__module__, type(AutoConfig.for_model("llamba")).__module__]
from transformers import AutoModelForCausalLM
answers.append(type(AutoModelForCausalLM.from_config(config)).__module__)
answers += [type(finder).__module__ for finder in sys.meta_path if "surgery.runtime" in type(finder).__module__]
print(json.dumps(answers))
"""
REGISTERED = ["surgery.families.mamba2", "surgery.hybrids.llamba", "surgery.families.mamba2"]
ORDERS = (
    "import surgery",
    "import transformers, surgery",
    "from transformers import AutoConfig; import surgery",
    "from transformers import AutoModelForCausalLM; import surgery",
    "import surgery; import transformers.modeling_utils",
    "import surgery; import transformers.models.auto.modeling_auto",
    "import surgery; from transformers import Mamba2ForCausalLM, pipeline",
    "import surgery; import peft",
    "import surgery.families.mamba2",
    "import surgery.families.mamba",
    "import surgery; surgery.load",
)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_hybrids_are_known_to_transformers_in_every_order(order):
    """And what waited for the import is gone from Python's finders afterwards."""
    assert fresh(order + USE) == REGISTERED


ENTRY_POINTS = """
[surgery.families]
outside = tests.surgery.outside:FAMILY
broken = tests.surgery.not_there:FAMILY
"""
WITH_OTHERS = """
import sys, warnings
import surgery
assert "torch" not in sys.modules
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    FIRST
    from transformers import AutoConfig
assert type(AutoConfig.for_model("outside_mamba_hybrid")).__module__ == "tests.surgery.outside"
import kernels
assert kernels.marker == "another package's", "transformers imports it; ours, without __init__.py, is found after it"
import surgery.kernels.ssd
assert surgery.kernels.ssd.SSD_SCAN.name == "ssd_scan" and sys.modules["kernels"] is kernels
messages = [str(warning.message) for warning in caught if "model family" in str(warning.message)]
assert len(messages) == 1 and "the model family 'broken' cannot be imported: ModuleNotFoundError" in messages[0], messages
"""


@pytest.mark.parametrize("first", ["pass", pytest.param("import tests.surgery.outside", marks=pytest.mark.slow)])
def test_families_of_other_packages_are_registered_too(first, tmp_path, monkeypatch):
    """One that cannot be imported is a warning: it must not make transformers' own import fail. And Hugging Face's package
    `kernels` is not shadowed by our folder of that name."""
    folder = tmp_path / "outside-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text('marker = "another package\'s"\n')
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # the repository's root comes before everything else
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert fresh(WITH_OTHERS.replace("FIRST", first) + USE) == REGISTERED


def test_bitsandbytes_is_hushed_before_it_is_imported():
    program = "import surgery, logging, sys; print([logging.getLogger('bitsandbytes').level, int('peft' in sys.modules)])"
    assert fresh(program) == [40, 0]


@pytest.mark.slow  # fourteen processes; test_help_version_and_a_typo_import_nothing_heavy is of one
def test_starting_takes_no_longer_than_is_on_record():
    """CPU time as a ratio to that of `import typer`, in one run. The bound is wide: torch alone takes twenty times as long."""
    recorded = Startup.read(ROOT / "recipes" / "startup.json")
    assert recorded.ratios.keys() == COMMANDS.keys()
    assert slower(measure(rounds=2), recorded) == []
    assert slower(recorded.model_copy(update={"ratios": dict.fromkeys(COMMANDS, 20.0)}), recorded)


def test_no_class_name_stands_for_two_things():
    nodes = [node for file in modules().values() for node in ast.walk(tree(file))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
