"""Mixing matrices: the leading gather and aggregate heads of a Transformer beside those of an SSM."""

from pathlib import Path
from typing import ClassVar

from surgery.errors import UserError
from surgery.locating.subject import Subject
from surgery.studies.figures import draw_matrices
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects, leading


class MixingMatrices(Study):
    """other: the second model. pairs: the size of the dictionary in the figure."""

    title: ClassVar[str] = "Mixing matrices of gather and aggregate heads"
    published: ClassVar[str] = (
        "Both architectures have gather and aggregate heads. A Transformer's change sharply from one token to the next; an "
        "SSM's are smoother."
    )

    draws_models: ClassVar[bool] = True

    other: str
    pairs: int = 6

    def measure(self, subjects: Subjects) -> Measurements:
        assert subjects.other is not None
        rows = []
        about: dict[str, list[str]] = {}
        other = Subject.of(subjects.other)
        for subject, ranking in ((subjects.subject, subjects.ranking), (other, subjects.rank(other))):
            chosen = [*leading(ranking, "gather"), *leading(ranking, "aggregate")]
            if not chosen:
                raise UserError(f"{subject.name}: locate gave no head a role whose mixing matrix can be had")
            about[subject.name] = [str(score.site) for score in chosen]
            for score in chosen:
                figures = {"answer's share of the query's weight on pairs": score.answer_mass, "pair's share": score.pair_mass}
                rows.append(
                    Row(
                        what=f"{Path(subject.name).name} {score.site} ({score.role})",
                        figures={name: figure for name, figure in figures.items() if figure is not None},
                    )
                )
        named = "; ".join(f"{row.what} {next(iter(row.figures.values())).value:.2f}" for row in rows)  # type: ignore[union-attr]
        return Measurements(
            about=about, summary=f"The answer's share of what the query position draws from pairs: {named}.", rows=tuple(rows)
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        assert subjects is not None
        draw_matrices(findings, path, subjects, self.pairs)


STUDY = MixingMatrices
