"""Writes a report into a folder."""

from pathlib import Path

from surgery.evaluation import markdown, views
from surgery.evaluation.report import Report
from surgery.evaluation.views import MeasuredModels
from surgery.records.record import write_text

REPORT = "report.json"


def write_report(measured: MeasuredModels, out: Path) -> None:
    """report.json and report.md, with all that views draw of it."""
    views.measured(measured, out)
    describe(measured.report, out)


def describe(report: Report, out: Path) -> None:
    """The report itself, without figures of what was measured."""
    write_text(out / "report.md", markdown.render(report))
    views.described(report, out)
    report.write(out / REPORT)  # where it is, all else is
