"""Writes a report into a folder."""

from pathlib import Path

from surgery.evaluation import markdown, views
from surgery.evaluation.report import Report
from surgery.evaluation.views import MeasuredModels
from surgery.records.record import write_text

REPORT = "report.json"


def write_report(measured: MeasuredModels, out: Path) -> None:
    """report.json, report.md, and all that views draw."""
    views.measured(measured, out)
    describe(measured.report, out)


def describe(report: Report, out: Path) -> None:
    """The same, without drawing again what was measured."""
    write_text(out / "report.md", markdown.with_pictures_of(out, markdown.render(report)))
    views.described(report, out)
    report.write(out / REPORT)  # last: where it is, all the rest is
