"""report.html: one page that holds everything that it shows, and loads nothing."""

from pathlib import Path
from typing import Any

from surgery.records.ranking import Ranking
from surgery.records.report import Report
from surgery.report.figures import as_svg, draw_figures, save_figures
from surgery.report.markdown import describe_provenance, load_lines, render_markdown
from surgery.report.tables import changes_table, controls_table, costs_table, results_table, short_table
from surgery.runtime.files import write_text
from surgery.runtime.progress import printable

ANSWERS = {"yes": "Yes", "mixed": "It gains and loses", "unclear": "Unclear", "no": "No", "not judged": "Cannot be judged"}


def render_page(
    report: Report,
    *,
    hybrid: str | None = None,
    ranking: Ranking | None = None,
    figures: dict[str, Any] | None = None,
) -> str:
    """The page. hybrid: the folder of the exported hybrid as seen from the page, if there is one. ranking: for the circuit."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    drawn = draw_figures(report, ranking) if figures is None else figures
    answer = ANSWERS[report.verdict.answer]
    said = report.verdict.sentence
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # and not what is HTML already
    )
    return environment.get_template("page.html").render(
        report=report,
        verdict=report.verdict,
        answer=answer,
        sentence=said.partition(": ")[2] if said.startswith(f"{answer}: ") else said,
        hybrid=hybrid,
        lines=load_lines(hybrid) if hybrid is not None else "",
        short=short_table(report),
        results=results_table(report),
        changes=[
            (model.description, changes_table(report, name), model.on_text) for name, model in list(report.models.items())[1:]
        ],
        controls=controls_table(report),
        costs=costs_table(report),
        circuit=ranking.circuit if ranking is not None else None,
        provenance=describe_provenance(report),
        figures={name: "" if figure is None else as_svg(figure, name) for name, figure in drawn.items()},
    )


def write_report(report: Report, folder: Path, *, hybrid: str | None = None, ranking: Ranking | None = None) -> list[str]:
    """Write the figures, report.md, report.html and, last, report.json into a folder; return the names of the files."""
    drawn = draw_figures(report, ranking)
    figures = save_figures(drawn, folder)
    write_text(folder / "report.md", render_markdown(report, hybrid=hybrid, figures=figures))
    write_text(folder / "report.html", render_page(report, hybrid=hybrid, ranking=ranking, figures=drawn))
    report.write(folder / "report.json")
    return [*figures, "report.md", "report.html", "report.json"]
