"""Draws the figures in recipes/ once more, from the records beside them: python -m tools.redraw

Nothing is measured. Figures of studies that open models are left out: `surgery run` draws those."""

from pathlib import Path
from tempfile import TemporaryDirectory

from surgery.evaluation.report import Report
from surgery.figures.views.results import draw
from surgery.records.recipe import Recipe
from surgery.studies import Findings, make
from surgery.studies.redraw import redraw
from tools import cache_figure, mixers_figure, names_figure

RECIPES = Path(__file__).parent.parent / "recipes"
REPORTS = {  # figure in recipes/ -> its report, and its file there
    "demo.retrieval.png": ("demo", "retrieval.png"), "demo-auto.retrieval.png": ("demo-auto", "retrieval.png"),
    "books.hits.png": ("books", "hits.png"), "lengths.png": ("lengths", "lengths.png"),
}  # fmt: skip


def main() -> None:
    with TemporaryDirectory() as folder:
        for shown, (name, file) in REPORTS.items():
            draw(Report.read(RECIPES / f"{name}.report.json"), Path(folder), only=file)
            _take(Path(folder) / file, RECIPES / shown)
            print(shown)
        for name, own in (("mixers.png", mixers_figure), ("gain-cache.png", cache_figure), ("tiny-names.png", names_figure)):
            own.draw(Path(folder) / name)
            _take(Path(folder) / name, RECIPES / name)
        for path in sorted(RECIPES.rglob("*.findings.json")):
            figure = path.with_name(path.name.removesuffix("findings.json") + "png")
            options = dict(Recipe.model_validate(Findings.read(path).provenance.recipe).study or {})
            if figure.exists() and not make(options.pop("name"), **options).draws_models:
                _take(redraw(path, Path(folder) / "figure.png"), figure)
                print(figure.relative_to(RECIPES))


def _take(drawn: Path, figure: Path) -> None:
    figure.write_bytes(drawn.read_bytes())
    drawn.unlink()


if __name__ == "__main__":
    main()
