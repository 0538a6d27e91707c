"""Writes a report and its figures into a folder."""

from pathlib import Path

from surgery.evaluation import html, markdown
from surgery.evaluation.head_matrices import Mixing
from surgery.evaluation.plots import draw
from surgery.evaluation.report import Report
from surgery.jobs.locating_stage import RANKING
from surgery.locating.ranking import Ranking
from surgery.records.record import write_text

REPORT = "report.json"


def write_report(report: Report, out: Path, matrices: Mixing | None) -> None:
    """report.json, report.md, report.html (with the atlas of a ranking that lies there) and their figures."""
    draw(report, out)
    if matrices is not None:
        matrices.write(out / "mixing.json")
    describe(report, out, matrices)


def describe(report: Report, out: Path, matrices: Mixing | None) -> None:
    """The report itself, without its figures."""
    ranking = Ranking.read(out / RANKING) if (out / RANKING).exists() else None
    weights = next(iter(report.models.values())).conditions
    if ranking is not None and ranking.conditions and weights and ranking.conditions.model != weights.model:
        ranking = None  # of another model, whose atlas this is not
    write_text(out / "report.md", markdown.render(report))
    write_text(out / "report.html", html.render(report, ranking, matrices))
    report.write(out / REPORT)
