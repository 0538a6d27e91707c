"""Retrieval against dictionary size, with and without the gather and the aggregate heads."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from surgery.evaluation.results import value
from surgery.studies.figures import AT_RANDOM, draw_curves
from surgery.studies.study import Findings, Measurements, OfHeads, Row, Subjects
from surgery.studies.sweep import CONTROL, kv_sweep


class KVSweep(OfHeads):
    """pairs: the dictionary sizes. layers: measure in the model of the first `layers` layers. controls: how many random sets of
    equally many heads are removed for comparison. The other options are those of OfHeads."""

    title: ClassVar[str] = "Key-value retrieval with and without the crucial heads"
    published: ClassVar[str] = (
        "Measured from 10 to 50 pairs with 1,000 examples each. (A later paper, arXiv 2602.11374, the other way round: "
        "Llama-3.2-1B with 10 of its 512 heads left as attention has 99.0, with none 13.2, with all 99.4.)"
    )

    pairs: tuple[int, ...] = (10, 20, 30, 40, 50)
    layers: int | None = Field(default=None, ge=1)
    controls: int = Field(default=2, ge=0)

    def measure(self, subjects: Subjects) -> Measurements:
        heads = self.heads(subjects)
        groups = {f"without {', '.join(map(str, sites))} ({role})": sites for role, sites in heads.items() if sites}
        options = subjects.recipe.locate
        curves = kv_sweep(
            subjects.subject, self.pairs, groups, layers=self.layers, controls=self.controls,
            examples=options.examples, batch_size=options.batch_size, seed=subjects.recipe.seed,
        )  # fmt: skip
        size = self.pairs[len(self.pairs) // 2]
        named = "; ".join(f"{curve.what} {curve.accuracy[size].accuracy:.3f}" for curve in curves)
        return Measurements(
            about={str(role): list(map(str, sites)) for role, sites in heads.items()}
            | {CONTROL: [list(map(str, curve.silent)) for curve in curves if curve.what.startswith(CONTROL)]},
            summary=f"At {size} pairs: {named}.",
            rows=tuple(
                Row(what=curve.what, figures={str(size): result for size, result in curve.accuracy.items()}) for curve in curves
            ),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        size = str(self.pairs[-1])
        told = ", ".join(f"{row.what} {value(row.figures[size]):.2f}" for row in findings.rows if AT_RANDOM not in row.what)
        draw_curves(findings, f"{size} pairs: {told}", path)


STUDY = KVSweep
