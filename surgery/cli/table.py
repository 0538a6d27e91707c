"""surgery table"""

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.console import show, starting
from surgery.cli.options import Out, check_there, check_writable


def table(
    reports: Annotated[
        list[Path],
        typer.Argument(help="report.json, or a folder that holds one; several, for one table.", callback=check_there),
    ],
    out: Out = None,
) -> None:
    """Print finished reports as the table of a paper.

    Parameters, memory, recall and language, as Markdown. With --out also as
    LaTeX and CSV (intervals and n included), with figures: accuracy against
    length, and recall against memory.

    Examples:
      surgery table runs/bench-tuned --out runs/table
    """
    with starting():
        from surgery.figures.lines import looks
        from surgery.figures.plots import draw_lines
        from surgery.figures.views.results import pictures, retrieval_figures
        from surgery.more import table as tables
        from surgery.records.record import write_text

    report = tables.read(reports)
    found = tables.columns(report.models)
    text = tables.markdown(found, report.models)
    show(text)
    if out is None:
        return
    check_writable(out)
    write_text(out / "table.tex", tables.latex(found, report.models))
    write_text(out / "table.csv", tables.as_csv(found))
    by_length = pictures(retrieval_figures(report, looks(list(report.models))))
    memory = tables.memory_figure(report.models)
    drawn = {**by_length, "memory.png": [memory] if memory is not None else []}
    for name, figures in drawn.items():
        if figures:
            draw_lines(figures, out / name)
            text += f"\n![{figures[0].title}]({name})\n"
    write_text(out / "table.md", text)
    show(f"Written: {out / 'table.md'} (and .tex, .csv)")
