"""The command line: what it says without torch, and that whatever is wrong is one line and status 2."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from surgery.cli import app
from surgery.records.plan import Plan
from surgery.records.ranking import Estimate, Ranking
from surgery.records.record import provenance
from surgery.records.site import Site
from tests.surgery.exporting.folders import InProcess

ROOT = Path(__file__).parents[3]
VERBS = [name for group in app.GROUPS.values() for name in group]
BASE = "checkpoints/tiny-mamba2"


@pytest.fixture
def surgery(monkeypatch, capsys):
    """Runs a command in this process: (status, standard output, standard error)."""
    monkeypatch.chdir(ROOT)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["surgery", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


IMPORTS = """
import io, json, sys
from contextlib import redirect_stdout
from surgery.cli import app
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["surgery", *arguments]
    with redirect_stdout(io.StringIO()):
        try:
            app.main()
        except SystemExit as ended:
            assert ended.code in (0, 2), (arguments, ended.code)
heavy = {"torch", "transformers", "numpy", "scipy", "matplotlib", "peft", "accelerate", "datasets", "huggingface_hub"}
print(sorted(heavy & set(sys.modules)))
"""


def test_help_lists_and_messages_import_nothing_heavy():
    from surgery.cli.list import KINDS

    commands = [["-h"], ["--version"], *([verb, flag] for verb in VERBS for flag in ("-h", "--help"))]
    commands += [["list", kind] for kind in KINDS]
    commands += [["run", "recipes/demo.yaml", "--set", "tune.stps=3"], ["look", "no-such"], ["splice", BASE, "x", "--out", "o"]]
    command = [sys.executable, "-c", IMPORTS, json.dumps(commands)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_settings_of_a_section_are_listed(surgery, monkeypatch):
    monkeypatch.delenv("USE_HUB_KERNELS", raising=False)
    status, out, _ = surgery("list", "settings", "tune.lora")
    assert status == 0
    assert "tune.lora.r" in out
    assert "bench" not in out
    assert os.environ["USE_HUB_KERNELS"] == "0"  # before anything is loaded


@pytest.fixture
def places(tmp_path):
    """Files and folders that are not what a command wants, by name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "hybrid").mkdir(parents=True)
    (tmp_path / "run" / "hybrid" / "config.json").write_text('{"grafts": [{"layer": 0}]}')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text('{"model_type": "mamba2", "num_hidden_layers": 1000000000}')
    (tmp_path / "plan.json").write_text('{"sites": ["L0.H0"], "starts": {}}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "nested.json").write_text("[" * 100_000)
    (tmp_path / "seed.json").write_text('{"sites": ["L0.H0"], "seed": 1000000000000000000000000000000}')
    half = Estimate(mean=0.5, low=0.4, high=0.6, n=9)
    made = {"heads": (), "probe": "kv", "accuracy": half, "chance": 0.0, "loss": 1.0, "questions": 9}
    Ranking(**made, provenance=provenance("/gone/tiny", "0", 0)).write(tmp_path / "ranking.json")
    (tmp_path / "r.yaml").write_text("model: checkpoints/no-such\n")
    (tmp_path / "bomb.yaml").write_text("a: &a [1]\nb: [*a]\n")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bytes.txt").write_bytes(b"\xff" * 30_000)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to("nowhere")  # a loop
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("run --otu x", "there is no option --otu (did you mean --out?)\n"),
        ("bench --modle", "there is no option --modle (see `surgery bench -h`)\n"),
        ("--verzion", "there is no option --verzion (did you mean --version?)\n"),
        ("bench", "MODEL is missing (see `surgery bench -h`)\n"),
        (f"locate {BASE} --out", "--out needs a value (see `surgery locate -h`)\n"),
        (f"splice {BASE} {{}}/plan.json", "--out is missing (see `surgery splice -h`)\n"),
        (f"tune {BASE} --resume=3", "--resume takes no value (see `surgery tune -h`)\n"),
        ("list probes a b", "too many arguments: b (see `surgery list -h`)\n"),
        ("chek x", "there is no command chek (did you mean check?)\n"),
        ("zzz", "there is no command zzz; `surgery -h` lists them\n"),
        (f"check {BASE} --batch x", "--batch has a wrong value: "),
        (f"check {BASE} --batch 0", "--batch has a wrong value: "),
        ("look no-such", "OWNER/NAME"),
        ("look checkpoints/tiny-mambaa2", "did you mean"),
        (f"look {BASE}/config.json", BASE),
        ("look {}/empty", "config.json"),
        ("look {}/run", "hybrid"),
        ("look {}/adapter", "is an adapter: load its base"),
        ("doctor {}/empty", "config.json"),
        ("doctor {}/deep", "layers"),
        ("check --architecture {}/deep/config.json", "layers"),
        (f"look {BASE} --text no-such.txt", "no-such.txt"),
        (f"look {BASE} --dtype int8", "dtype"),
        ("run {}/r.yaml", "no-such"),
        ("run {}/bomb.yaml", "alias"),
        ("run recipes/demo.yml", "did you mean"),
        ("run recipes/mamba2-130m.yaml --set model=checkpoints/tiny-mamba2", "train.txt"),
        (f"bench {BASE} {{}}/run/hybrid --out {{}}/o --set data.facts=no.jsonl", "no.jsonl"),
        ("run recipes/demo.yaml --text README.md", "--text"),
        ("run recipes/demo.yaml --verify never", "--verify"),
        ("run {}/run/hybrid", "hybrid"),
        ("run {}/pipe", "no folder"),
        (f"run {BASE} --text {{}}/short.txt", "characters"),
        (f"run {BASE} --text {{}}/bytes.txt", "UTF-8"),
        (f"run {BASE} --text {{}}/mine", "mine"),
        (f"run {BASE} --out {{}}/mine", "notes.txt"),
        (f"run {BASE} --out {BASE} --overwrite", "reads"),
        (f"run {BASE} --out {{}}/list.json/x", "list.json"),
        (f"run {BASE} --out {{}}/nowhere", "leads nowhere"),
        ("look {}/nowhere", "but a link that leads nowhere"),
        ("run recipes/demo.yaml --dry-run --set plan.sites=L99.H0", "no site L99.H0"),
        ("run recipes/demo.yaml --dry-run --set locate.options.pairs=101", "kv takes"),
        (f"look {BASE} --text {{}}/pipe", "pipe"),
        (f"run {BASE} --set plan.head=2", "plan.heads"),
        (f"locate {BASE} --set locate.probe=needel", "needle"),
        (f"locate {BASE} --out {{}}", "folder"),
        (f"locate {BASE} --out {{}}/list.json --overwrite", "list.json"),
        ("plan {}/plan.json", "is a plan"),
        ("plan {}/list.json", "ranking"),
        ("plan {}/ranking.json", "say where it is with --base"),
        ("splice {}/run/hybrid {}/plan.json --out {}/o", "hybrid"),
        (f"splice {BASE} {{}}/list.json --out {{}}/o", "plan"),
        (f"splice {BASE} {{}}/plan.json --out {{}}/mine", "notes.txt"),
        (f"tune {BASE} --out {{}}/o", "no hybrid"),
        ("tune {}/run/hybrid --out {}/run --overwrite", "reads"),
        ("tune {}/run/hybrid --out {}/mine --overwrite --set data.facts={}/mine/notes.txt", "reads"),
        (f"bench {BASE} {{}}/run/hybrid --out {{}}/mine --overwrite --set data.facts={{}}/mine/notes.txt", "reads"),
        (f"splice {BASE} {{}}/plan.json --out {{}} --overwrite", "reads"),
        ("splice {}/deep {}/plan.json --out {}/deep --overwrite", "reads"),
        (f"plan {{}}/ranking.json --base {BASE} --out {{}}/ranking.json --overwrite", "reads"),
        (f"locate {BASE} --recipe {{}}/r.yaml --out {{}}/r.yaml --overwrite", "reads"),
        (f"bench {BASE} {{}}/run/hybrid --out {{}}/run --overwrite", "reads"),
        (f"bench {{}}/run/hybrid {BASE} --out {{}}/o", "first"),
        (f"bench {BASE} {{}}/run/hybrid --out {{}}/o --require kv.64", "--require"),
        (f"bench {BASE} {{}}/run/hybrid --out {{}}/o --require kv.64>=1.2.3", "--require"),
        (f"bench {BASE} {BASE} --out {{}}/o --require kv.65>=0.8", "'kv.65' is not measured"),
        (f"splice {BASE} {{}}/nested.json --out {{}}/o", "Invalid JSON"),
        (f"splice {BASE} {{}}/seed.json --out {{}}/o", "seed"),
        ("export {}/run/hybrid --format x --out {}/o", "format"),
        ("export {}/run/hybrid --out {}/run/hybrid --overwrite", "reads"),
        ("list nothing", "probes"),
        ("list settings nothing", "nothing"),
        ("look {}/broken --text README.md", "broken"),
    ],
)
def test_a_misuse_is_one_line_and_writes_nothing(surgery, places, command, named):
    before = {path: path.lstat().st_mtime_ns for path in places.rglob("*")}
    status, _, err = surgery(*command.replace("{}", str(places)).split())
    assert status == 2
    assert len(err.splitlines()) == 1
    assert named in err
    assert {path: path.lstat().st_mtime_ns for path in places.rglob("*")} == before


class PanicException(BaseException):  # as that of the library tokenizers is called
    pass


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("two\nlines"), 2),
        (PanicException("panic"), 2),
        (OSError(28, "No space left on device", "x"), 2),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 2),
        (UnicodeEncodeError("ascii", "é", 0, 1, "no"), 2),
        (MemoryError(), 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_ends_a_command_is_one_line(surgery, monkeypatch, error, status):
    def fail(*_):
        raise error

    monkeypatch.setattr("surgery.records.recipe.list_settings", fail)
    found, _, err = surgery("list", "settings")
    assert found == status
    assert len(err.splitlines()) == 1
    known = isinstance(error, OSError | PanicException | SafetensorError | MemoryError | RuntimeError)
    assert ("please report" in err) == (status == 2 and not known)


def test_ctrl_c_says_how_to_go_on(surgery, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("surgery.cli.run.read_recipe", fail)
    status, _, err = surgery("run", "recipes/demo.yaml", "--overwrite")
    assert status == 130
    assert err.rstrip().endswith("surgery run recipes/demo.yaml --resume")


def run_module(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "surgery", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_python_m_surgery_runs_no_code_of_the_current_folder(tmp_path):
    for name in ("typer", "json", "click", "yaml", "pydantic"):
        (tmp_path / f"{name}.py").write_text("open('RAN', 'w')")
    done = run_module(tmp_path, "list", "suites")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "RAN").exists()


def test_a_folder_that_is_gone_and_a_closed_pipe_are_no_tracebacks(tmp_path):
    script = f"cd {tmp_path} && mkdir x && cd x && rmdir ../x && PYTHONPATH={ROOT} {sys.executable} -P -m surgery look y"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    script = f"cd {ROOT} && {sys.executable} -m surgery list settings | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_a_layer_graft_is_tuned_from_its_folder_beside_its_base(surgery, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.exporting.export.start_reader", lambda _: InProcess())
    made = provenance("tiny-mamba2", "0" * 64, 0, {"dtype": "float64"})  # of the base in another dtype than it is read in here
    Plan(kind="layer", sites=(Site(2),), provenance=made).write(tmp_path / "plan.json")
    assert surgery("splice", BASE, tmp_path / "plan.json", "--out", tmp_path / "spliced")[0] == 0
    few = ["--set", "tune.steps=1", "--set", "tune.batch_size=2", "--set", "tune.examples=[{options: {pairs: 4}}]"]
    assert surgery("tune", tmp_path / "spliced", *few, "--out", tmp_path / "tuned")[0] == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("spliced", "tuned"))
    assert {name.split(".")[2] for name in before if not torch.equal(before[name], after[name])} == {"2"}
    assert surgery("export", tmp_path / "tuned", "--format", "nemotron_h", "--out", tmp_path / "served")[0] == 0


def test_a_plan_of_another_base_is_refused(surgery, tmp_path):
    made = provenance("me/other", "0" * 64, 0, {})
    Plan(sites=(Site(1, (0,)),), provenance=made).write(tmp_path / "plan.json")
    status, _, err = surgery("splice", BASE, tmp_path / "plan.json", "--out", tmp_path / "spliced")
    assert status == 2
    assert "me/other" in err
    assert not (tmp_path / "spliced").exists()


def test_a_weight_that_is_no_number_is_named_before_any_law(surgery, tmp_path):
    shutil.copytree(ROOT / BASE, tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["backbone.layers.1.mixer.D"][2] = torch.nan
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    status, out, err = surgery("check", tmp_path / "base")
    assert (status, out) == (2, "")
    assert "'backbone.layers.1.mixer.D' holds a NaN" in err
