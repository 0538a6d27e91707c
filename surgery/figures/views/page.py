"""report.html: one file that shows all of a report and loads nothing, in any browser and in print.

Here is decided what is shown; charts.py gives the figures their geometry, page/ draws. What is drawn is in the file before any
script runs: the scripts only say more about what a reader points at.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from surgery.evaluation import markdown
from surgery.evaluation.automatic import automatic_choices, rounds
from surgery.evaluation.judgement import judge
from surgery.evaluation.report import Report
from surgery.evaluation.results import Results, count
from surgery.figures.atlas_page import Atlas, atlas
from surgery.figures.charts import chart
from surgery.figures.comparisons import SYMBOLS, closest_control, summaries
from surgery.figures.lines import looks
from surgery.figures.mixing_page import mixing_page
from surgery.figures.ranking_of import ranking_of
from surgery.figures.views.mixing import Mixing, mixing_of
from surgery.figures.views.results import cost_figures, retrieval_figures
from surgery.locating.ranking import Ranking
from surgery.records.names import is_control
from surgery.records.record import write_text

FILES = {"described": ["report.html"]}
PAGE = Path(__file__).parents[1] / "page"


def described(report: Report, out: Path) -> None:
    """report.html, with the atlas of the ranking and the mixing matrices that lie there."""
    write_text(out / "report.html", render(report, ranking_of(report, out), mixing_of(report, out)))


def render(report: Results, ranking: Ranking | None = None, mixing: Mixing | None = None) -> str:
    """The page. ranking: of the base, for the atlas; one of another model is left out."""
    if ranking is not None and ranking.provenance.base_fingerprint != report.provenance.base_fingerprint:
        ranking = None
    look = looks(list(report.models))
    base = report.base
    models = summaries(report)
    content: dict[str, Any] = {
        "report": report, "answers": _answers(report), "base": next(iter(report.models)), "looks": look, "symbols": SYMBOLS,
        "explanation": markdown.EXPLANATION, "found": automatic_choices(report), "rounds": rounds(report),
        "hybrids": [model for model in models if not is_control(model.name)],
        "controls": [model for model in models if is_control(model.name)],
        "closest": closest_control(report), "results": markdown.rows(report), "summaries": models,
        "retrieval": [chart(figure) for figure in retrieval_figures(report, look).values()],
        "costs": [chart(figure) for figure in cost_figures(report, look)],
        "serving": markdown.serving(report), "served": markdown.served(report),
        "atlas": atlas(ranking, report.plan) if ranking else Atlas(), "mixing": mixing_page(mixing) if mixing else None,
        "compared": sum(len(model.evidence) for model in report.models.values()),
        "counts": _span([count(result) for result in base.results().values()]),
        "recipe": yaml.safe_dump(report.provenance.recipe, sort_keys=False) if report.provenance.recipe else "",
        "plan": report.plan.model_dump_json(indent=2, exclude={"provenance"}) if report.plan else "",
        "style": (PAGE / "page.css").read_text(encoding="utf-8"), "script": (PAGE / "page.js").read_text(encoding="utf-8"),
    }  # fmt: skip
    return _template().render(content)


@cache
def _template() -> Template:
    loader = FileSystemLoader(PAGE)
    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=loader, **options).get_template("page.html.j2")  # type: ignore[arg-type]


def _answers(report: Results) -> list[tuple[str, str, str, str]]:
    """Of every judged model: its name, the verdict in a word or two, what was seen, and controls and cost."""
    answers = []
    for judgement in judge(report):
        verdict, _, rest = judgement.answer.partition(": ")
        answers.append((judgement.model, verdict, rest[:1].upper() + rest[1:], " ".join(judgement.details)))
    return answers


def _span(counts: list[int]) -> str:
    return " to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)})) if counts else ""
