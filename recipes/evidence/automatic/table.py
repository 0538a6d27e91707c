"""The table of README.md, from the reports beside it.

cp -r checkpoints/tiny-letters my-model && surgery run my-model --out runs/tiny-letters
cp runs/tiny-letters/report.json recipes/evidence/automatic/tiny-letters.json
python recipes/evidence/automatic/table.py
"""

import re
from collections.abc import Iterator
from pathlib import Path

from surgery.records.report import Report, figure
from surgery.runtime.files import read_text, write_text

HERE = Path(__file__).parent
COLUMNS = {"kv.64": "64 pairs", "kv_unseen.64": "64 pairs, new keys"} | {
    "multiple_choice": "multiple choice",
    "knowledge": "facts",
}


def rows() -> Iterator[list[str]]:
    """One line a base: before and after, and the control that does best."""
    yield ["base", "what became of it", *COLUMNS.values(), "KL on text", "best control with 64 pairs"]
    yield ["---"] * (len(COLUMNS) + 4)
    for path in sorted(HERE.glob("tiny-*.json")):
        report = Report.read(path)
        before, after, control = report.base.results, report.main.results, report.models[report.best_control() or "base"]
        changes = [f"{figure(before[name])} → {figure(after[name])}" for name in COLUMNS]
        kl = f"{report.main.on_text.kl.mean:.1g}" if report.main.on_text else "-"
        best = f"{figure(control.results['kv.64'])} ({control.description})"
        yield [f"`{path.stem}`", report.main.description, *changes, kl, best]


if __name__ == "__main__":
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows())
    write_text(
        HERE / "README.md", re.sub(r"(?ms)^\| base.*?\n\n", lambda _: f"{text}\n\n", read_text(HERE / "README.md"), count=1)
    )
