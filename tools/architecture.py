"""How large the project is, and how much code one pass of the main job goes through.

    python tools/architecture.py            # prints both
    python tools/architecture.py --write    # and fills the table of docs/architecture.md, beside what 0.30.0 had

tests/test_budget.py holds the sizes to budget.toml.
"""

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "recipes" / "evidence" / "house" / "architecture.json"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- filled from recipes/evidence/house/architecture.json -->", "<!-- end -->"
SMALL = 60  # lines of a file that may be a crumb

ROWS = {
    "source_lines": "lines of source (surgery, kernels, tools)",
    "test_lines": "lines of tests",
    "files": "files of source, empty ones not counted",
    "small_files": f"files of source under {SMALL} lines",
    "folders": "folders of surgery",
    "median_function": "lines of a function, median",
    "settings": "settings of a recipe",
    "pages": "pages of docs",
    "words": "words of docs and README",
    "start_modules": "modules imported by `surgery --help`",
    "functions": "functions of ours called in one pass",
    "with_classes": "the same with bodies of classes",
    "path_files": "files that these stand in",
    "depth": "deepest stack of ours",
}

SETTINGS = "from surgery.records.recipe import list_settings; print(len(list(list_settings())))"
START = "import sys; sys.argv = ['surgery', '--help']; import surgery.cli.app; print(len(sys.modules))"

# One pass of the main job, under a profile.
PATH = """
import inspect, json, os, sys, tempfile
from pathlib import Path

ROOT = str(Path.cwd().resolve())
CALLED, FILES, DEPTH, DEEPEST = set(), {}, 0, 0

def is_ours(code):
    if code not in FILES:
        name = os.path.realpath(code.co_filename)
        FILES[code] = name if name.startswith((ROOT + "/surgery/", ROOT + "/kernels/")) else None
    return FILES[code] is not None

def profile(frame, event, argument):
    global DEPTH, DEEPEST
    if event not in ("call", "return") or not is_ours(frame.f_code):
        return
    DEPTH += 1 if event == "call" else -1  # a generator returns when it yields
    DEEPEST = max(DEEPEST, DEPTH)
    if event == "call" and not frame.f_code.co_name.startswith("<"):  # neither modules nor lambdas and comprehensions
        CALLED.add(frame.f_code)

import torch
import surgery
torch.set_num_threads(1)

def walk(out):
    few = "model=checkpoints/tiny-mamba2 locate.examples=8 locate.roles=0 tune.steps=2 tune.batch_size=2 "
    few += "tune.text_batch_size=2 bench.limit=8 bench.pairs=[4] bench.windows=2 bench.contexts=[] bench.controls=[]"
    surgery.run(surgery.read_recipe(None, few.split()), out / "run")

with tempfile.TemporaryDirectory() as out:
    sys.setprofile(profile)
    try:
        walk(Path(out))
    finally:
        sys.setprofile(None)
both = {(FILES[code], code.co_firstlineno, code.co_name) for code in CALLED}
# The body of a class runs when its module is imported.
places = {(FILES[code], code.co_firstlineno, code.co_name) for code in CALLED if code.co_flags & inspect.CO_OPTIMIZED}
found = {"functions": len(places), "with_classes": len(both), "path_files": len({file for file, *_ in places})}
print(json.dumps(found | {"depth": DEEPEST}))
"""


def function_lengths(files: list[Path]) -> Iterator[int]:
    """The lines of every function, decorators included."""
    for file in files:
        if file.suffix == ".py":
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                    yield node.end_lineno - min([node.lineno, *(each.lineno for each in node.decorator_list)]) + 1


def count_lines(files: list[Path]) -> int:
    """The lines of all these files."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def measure_sizes(checkout: Path) -> dict[str, float]:
    """What budget.toml bounds."""
    files = [*(checkout / "surgery").rglob("*.py"), *(checkout / "tools").rglob("*.py")]
    files = [file for file in files if "kernels" not in file.relative_to(checkout).parts[1:2]]  # a link to /kernels
    files += [file for file in (checkout / "kernels").rglob("*") if file.suffix in (".py", ".c", ".h")]
    tests = [file for file in (checkout / "tests").rglob("*") if file.suffix in (".py", ".c", ".h")]
    pages = sorted((checkout / "docs").rglob("*.md"))
    folders = {file.parent for file in files if file.is_relative_to(checkout / "surgery")}
    sizes = [count_lines([file]) for file in files]
    return {
        "source_lines": sum(sizes),
        "test_lines": count_lines(tests),
        "files": sum(size > 0 for size in sizes),
        "small_files": sum(0 < size < SMALL for size in sizes),
        "folders": len(folders - {checkout / "surgery"}),
        "median_function": statistics.median(function_lengths(files)),
        "settings": int(run_python(checkout, SETTINGS)),
        "pages": len(pages),
        "words": sum(len(page.read_text(encoding="utf-8").split()) for page in (*pages, checkout / "README.md")),
        "start_modules": int(run_python(checkout, START)),
    }


def measure_path(checkout: Path) -> dict[str, float]:
    """The functions and files of ours that one pass of the main job calls, and its deepest stack."""
    return json.loads(run_python(checkout, PATH))


def run_python(checkout: Path, script: str) -> str:
    """The last line that a script prints, run in a checkout by this Python."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout.splitlines()[-1]


def fill_page(page: str, record: dict[str, Any]) -> str:
    """The page with the record's table between its marks: a column for each version."""
    lines = [f"| | {' | '.join(record)} |", "|---|" + "---|" * len(record)]
    for key, about in ROWS.items():
        cells = [f"{values[key]:,.0f}" if key in values else "-" for values in record.values()]
        lines.append(f"| {about} | {' | '.join(cells)} |")
    table = "\n".join([BEGIN, "", *lines, "", END])
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: table, page, flags=re.DOTALL)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    measured = measure_sizes(ROOT) | measure_path(ROOT)
    for key, about in ROWS.items():
        print(f"{about:50} {measured[key]:8,.0f}")
    if given.write:
        record = json.loads(RECORD.read_text()) | {"now": measured}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
        PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
