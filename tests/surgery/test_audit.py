"""What runs while the verbs work on a stranger's files, as Python itself reports it (sys.addaudithook)."""

import json
import subprocess
import sys

from surgery.records.plan import Plan
from tests.conftest import ROOT, VOCABULARY, random_base

HOOKED = """
import json, os, sys
from pathlib import Path

folder, calls = sys.argv[1], json.loads(sys.argv[2])
import torch, transformers, matplotlib.figure, surgery.cli.app  # what libraries do when they are imported is theirs
from surgery.kernels.dispatch import use
from surgery.doctor.diagnosis import diagnose
diagnose()  # compiles kernels, which the page names
seen = []

def hook(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn"):
        command = arguments[1] if isinstance(arguments[1], (list, tuple)) else [arguments[1]]
        seen.append((event, [str(part) for part in command]))
    elif event in ("os.system", "socket.connect", "socket.getaddrinfo", "pty.spawn"):
        seen.append((event, [str(arguments[0])]))
    elif event in ("exec", "import", "compile"):
        name = getattr(arguments[0], "co_filename", "") if event == "exec" else arguments[1]
        if isinstance(name, bytes):
            name = name.decode()
        if isinstance(name, str) and name.startswith(folder):
            seen.append((event, [name]))

sys.addaudithook(hook)
from surgery.cli.app import main
status = []
for call in calls:
    sys.argv = ["surgery", *call]
    try:
        main()
        status.append(0)
    except SystemExit as stop:
        status.append(stop.code)
print(json.dumps({"status": status, "seen": seen}), file=sys.__stdout__)
"""
STRANGE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "who/repo--evil.Model", "AutoTokenizer": ["evil.Words", None]}
FEW = ("locate.options.pairs=3", "locate.examples=4", "locate.exact=false")
TUNE = (
    "tune.steps=1",
    "tune.batch_size=2",
    "tune.text_batch_size=1",
    "tune.text_tokens=16",
    "tune.lessons=[{options: {pairs: 2}}]",
)
BENCH = ("bench.suites=[quick]", "bench.pairs=[3]", "bench.limit=4", "bench.windows=2", "bench.window=32", "bench.contexts=[]")


def settings(*names):
    return [part for name in names for part in ("--set", name)]


def test_nothing_of_a_strangers_runs_and_nothing_connects(tokenizer, tmp_path):
    folder = tmp_path / 'a"b $(touch ran)'
    base = folder / "base'; import os"
    random_base(vocab_size=VOCABULARY).save_pretrained(base)
    tokenizer.save_pretrained(base)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        content = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(content | {"auto_map": STRANGE}))
    for place in (folder, base):
        for name in ("evil.py", "sitecustomize.py", "torch.py", "conversion.py"):
            (place / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    Plan(sites=("L1.H3",)).write(folder / "plan.json")
    hybrid, tuned = str(folder / "out\n1"), str(folder / "tuned")
    calls = [
        ["doctor", str(base)],
        ["locate", str(base), "--out", str(folder / "located"), *settings(*FEW)],
        ["plan", str(folder / "located" / "ranking.json"), "--out", str(folder / "made.json"), "--set", "plan.sites=L1.H3"],
        ["splice", str(base), str(folder / "plan.json"), "--out", hybrid, "--verify", "tensors"],
        ["tune", hybrid, "--out", tuned, "--verify", "tensors", *settings(*TUNE)],
        ["bench", str(base), tuned, "--out", str(folder / "bench"), *settings(*BENCH)],
        ["export", tuned, "--format", "patch", "--out", str(folder / "patch"), "--verify", "tensors"],
        ["publish", tuned, "who/model", "--dry-run"],
        ["bench", str(base), tuned, "--out", str(folder / "b2"), "--set", "bench.engine_python=./evil.sh"],
        ["settings"],
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-c", HOOKED, str(folder), json.dumps(calls)], cwd=folder, capture_output=True, text=True,
        check=False, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
                          "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == [0, 0, 0, 0, 0, 0, 0, 0, 2, 0], done.stderr[-3000:]
    started = [arguments for event, arguments in told["seen"] if event == "subprocess.Popen"]
    assert len(started) == 3  # splice, tune, export: each reads its result back
    for command in started:
        assert command[:3] == [sys.executable, "-P", str(ROOT / "surgery" / "models" / "answers.py")]
    assert [each for each in told["seen"] if each[0] != "subprocess.Popen"] == []
    assert not (tmp_path / "ran").exists()
    assert not (folder / "ran").exists()
