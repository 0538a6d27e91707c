"""The ranking that a report in a folder goes back to."""

from pathlib import Path

from surgery.evaluation.report import Report
from surgery.jobs.locating_stage import RANKING
from surgery.locating.ranking import Ranking


def ranking_of(report: Report, out: Path) -> Ranking | None:
    """The ranking in `out`, if it is of the report's base."""
    ranking = Ranking.read(out / RANKING) if (out / RANKING).exists() else None
    weights = report.base.conditions
    if ranking is not None and ranking.conditions and weights and ranking.conditions.model != weights.model:
        return None
    return ranking
