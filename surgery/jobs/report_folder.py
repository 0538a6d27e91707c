"""Writes a report and its figures into a folder."""

from pathlib import Path

from surgery.evaluation import html, markdown
from surgery.evaluation.head_matrices import Mixing, draw_grafts
from surgery.evaluation.report import Report
from surgery.evaluation.report_figures import draw
from surgery.jobs.locating_stage import RANKING
from surgery.locating.atlas import draw_scores
from surgery.locating.ranking import Ranking
from surgery.records.record import write_text

REPORT = "report.json"


def write_report(report: Report, out: Path, matrices: Mixing | None) -> None:
    """report.json, report.md, report.html (with the atlas of a ranking that lies there) and their figures."""
    draw(report, out)
    if matrices is not None:
        matrices.write(out / "mixing.json")
        draw_grafts(matrices, out / "grafts.png")
    if report.plan is not None and (ranking := _ranking(report, out)) is not None:
        draw_scores(ranking, out / "atlas.png", report.plan)  # once more, with the grafted heads framed
    describe(report, out, matrices)


def describe(report: Report, out: Path, matrices: Mixing | None) -> None:
    """The report itself, without its figures."""
    ranking = _ranking(report, out)
    write_text(out / "report.md", markdown.render(report))
    write_text(out / "report.html", html.render(report, ranking, matrices))
    report.write(out / REPORT)


def _ranking(report: Report, out: Path) -> Ranking | None:
    """The ranking in `out`, if it is of the report's base."""
    ranking = Ranking.read(out / RANKING) if (out / RANKING).exists() else None
    weights = report.base.conditions
    if ranking is not None and ranking.conditions and weights and ranking.conditions.model != weights.model:
        return None
    return ranking
