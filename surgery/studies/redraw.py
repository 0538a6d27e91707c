"""Draws the figure of a study once more, from its findings: python -m surgery.studies.redraw FINDINGS [FIGURE]

Nothing is measured again. Models are opened only for a study whose figure shows more of them than the findings hold.
"""

import sys
from pathlib import Path

from surgery.errors import UserError
from surgery.jobs.opening import open_beside, open_checkpoint
from surgery.records.recipe import Recipe
from surgery.studies import make
from surgery.studies.conduct import FIGURE
from surgery.studies.study import Findings, Subjects


def redraw(findings: Path, figure: Path | None = None) -> Path:
    """Draw what the file `findings` holds. Returns the figure's path, by default figure.png beside findings.json, or NAME.png
    beside NAME.findings.json.

    Raises UserError for a file that holds no findings, and for models that cannot be opened where they are needed."""
    record = Findings.read(findings)
    recipe = Recipe.model_validate(record.provenance.recipe)
    options = dict(recipe.study or {})
    study = make(options.pop("name", ""), **options)
    subjects = None
    if study.draws_models:
        checkpoint = open_checkpoint(recipe, False)
        other = getattr(study, "other", None)
        beside = open_beside(checkpoint, other, recipe, False) if other else None
        subjects = Subjects(recipe, checkpoint, findings.parent, other=beside)
    name = findings.name.removesuffix("findings.json") + "png"
    figure = figure or findings.with_name(FIGURE if name == "png" else name)
    study.draw(record, figure, subjects)
    return figure


def main(arguments: list[str]) -> int:
    """The command; 2 for a wrong input, which is said in one line."""
    if not 1 <= len(arguments) <= 2:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    try:
        print(redraw(*map(Path, arguments)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
