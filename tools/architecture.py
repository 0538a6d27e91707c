"""How large the package is, and how far a model walks in it: docs/architecture.md's table.

    python -m tools.architecture --out recipes/architecture.json          # measures this checkout as "now"
    python -m tools.architecture --checkout OTHER --as 0.20.0 --out ...   # another one, as it was before

A walk counts what takes the model (a Checkpoint and a Subject hold one), or in splice the plan, as an argument: the functions,
the files that these stand in, and the calls. What a model's own forward calls, and the kernels, are not counted.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "recipes" / "architecture.json", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- filled from recipes/architecture.json -->", "<!-- end -->"
AROUND = ("figures", "serving", "pretraining", "more", "costs", "studies", "doctor", "commands", "cli")
OWN = ("hybrids", "kernels")  # whose calls are a model's own

WALKS = """
import collections, json, sys, tempfile
from pathlib import Path
import surgery
from surgery.loading.opened import Checkpoint
from surgery.locating.subject import Subject
from surgery.records.recipe import Data, Tune
from transformers import PreTrainedModel

try:
    from surgery.cli.sections import rows, sections
except ImportError:  # of an earlier version
    from surgery.records.settings import rows, sections

root, own = Path(surgery.__file__).parent, json.loads(sys.argv[1])

def walk(kinds, work):
    calls = collections.Counter()
    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(root)) and "<" not in code.co_name:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            file = Path(code.co_filename).relative_to(root)
            if file.parts[0] not in own and any(isinstance(frame.f_locals.get(name), kinds) for name in names):
                calls[str(file), code.co_name] += 1
    sys.setprofile(profile)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    counts = {"functions": len(calls), "files": len({file for file, _ in calls}), "calls": calls.total()}
    return counts, result

base = surgery.load("checkpoints/tiny-mamba2")
few = {"examples": 4, "options": {"pairs": 4}, "exact": False, "data": Data(skills=())}
model = (PreTrainedModel, Checkpoint, Subject)
located, ranking = walk(model, lambda: surgery.locate(base, **few))
plan = surgery.plan(ranking)
spliced, hybrid = walk((surgery.Plan,), lambda: surgery.splice(base, plan))
tuned, _ = walk(model, lambda: surgery.tune(hybrid, options=Tune(steps=2, batch_size=2), data=Data(skills=())))
names = list(sections())
print(json.dumps({
    "locate": located, "splice": spliced, "tune": tuned,
    "settings": sum(len(rows(name)) for name in names), "sections": len(names),
}))
"""


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def measure(checkout: Path) -> dict[str, Any]:
    """Lines by part, settings, and walks, of a checkout."""
    package = [file for file in (checkout / "surgery").rglob("*.py") if "kernels" not in file.relative_to(checkout).parts]
    around = [file for file in package if file.relative_to(checkout / "surgery").parts[0] in AROUND]
    kernels = [file for file in (checkout / "kernels").iterdir() if file.suffix in (".py", ".c", ".h")]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WALKS, json.dumps(OWN)],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return {
        "core": lines([file for file in package if file not in around]),
        "around": lines(around),
        "kernels": lines(kernels),
        "tests": lines([*(checkout / "tests").rglob("*.py")]),
        "tools": lines([*(checkout / "tools").rglob("*.py")]),
        **json.loads(done.stdout.splitlines()[-1]),
    }


def table(record: dict[str, Any]) -> str:
    """The record as the page shows it: a column for each version."""
    versions = list(record)
    rows: list[tuple[str, list[str]]] = [
        (name, [f"{record[version][key]:,}" for version in versions])
        for name, key in (
            ("lines of the core", "core"), ("lines around it", "around"), ("lines of kernels", "kernels"),
            ("lines of tests", "tests"), ("lines of maintainers' tools", "tools"), ("settings of a recipe", "settings"),
        )
    ]  # fmt: skip
    for name, key in (("`base` in locate", "locate"), ("`plan` in splice", "splice"), ("`model` in tune", "tune")):
        walks = [record[version][key] for version in versions]
        rows.append((name, [f"{w['functions']} functions in {w['files']} files, {w['calls']} calls" for w in walks]))
    head = [f"| | {' | '.join(versions)} |", f"|{'---|' * (len(versions) + 1)}"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)])


def fill(page: str, record: dict[str, Any]) -> str:
    """The page with the table of a record between its marks."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table(record)}\n\n{END}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--as", dest="version", default="now")
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    record = json.loads(given.out.read_text()) if given.out.exists() else {}
    record[given.version] = measure(given.checkout.resolve())
    given.out.write_text(json.dumps(record, indent=2) + "\n")
    if given.out == RECORD:
        PAGE.write_text(fill(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
