"""Delegation: does attention or the SSM aggregate in a hybrid? Each kind's mixing is removed at the query position only."""

from pathlib import Path
from typing import ClassVar

from surgery.errors import UserError
from surgery.evaluation.results import value
from surgery.studies.figures import draw_bars
from surgery.studies.prune import last_rows
from surgery.studies.study import Findings, Measurements, Study, Subjects, change, rows


class Delegation(Study):
    title: ClassVar[str] = "Hybrids delegate aggregation to attention"
    published: ClassVar[str] = (
        "Masking the last row of every attention matrix of Zamba2-7B takes MMLU from 64.3 to 34.9; the knowledge tasks stay."
    )

    def measure(self, subjects: Subjects) -> Measurements:
        outcomes = last_rows(subjects.pruner)
        if not outcomes:
            raise UserError("delegation needs a hybrid; the model has mixers of one kind")
        whole = subjects.pruner.base
        return Measurements(
            about={"layers": subjects.subject.anatomy.kinds()},
            summary="; ".join(f"{outcome.what}: {change(whole, outcome)}" for outcome in outcomes.values()) + ".",
            rows=rows([whole, *outcomes.values()]),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        last = findings.rows[-1]
        told = ", ".join(f"{probe} {value(result):.2f}" for probe, result in last.figures.items())
        draw_bars(findings, f"{last.what.capitalize()}: {told}", path)


STUDY = Delegation
