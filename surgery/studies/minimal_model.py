"""The minimal model: layers are dropped from the end until retrieval collapses; it is the last model before the collapse."""

from pathlib import Path
from typing import ClassVar

from surgery.studies.figures import draw_bars, retrieved
from surgery.studies.prune import minimal_model, shorten
from surgery.studies.study import Findings, Measurements, Study, Subjects, change, rows


class MinimalModel(Study):
    title: ClassVar[str] = "The minimal model: layers dropped from the end"
    published: ClassVar[str] = (
        "In Llama-3.1-8B the knowledge tasks stay flat while MMLU, which needs retrieval too, holds until one layer more is "
        "dropped and then falls to chance."
    )

    def measure(self, subjects: Subjects) -> Measurements:
        pruner = subjects.pruner
        cuts = shorten(pruner)
        layers, minimal = len(subjects.subject.anatomy.blocks), minimal_model(pruner, cuts)
        *_, before, last = pruner.base, *cuts
        return Measurements(
            about={"layers": layers, "minimal": minimal},
            summary=f"The minimal model has {minimal} of {layers} layers. One layer less: {change(before, last)}.",
            rows=rows([pruner.base, *cuts]),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        *_, before, last = retrieved(findings)
        kept = findings.about["minimal"]
        draw_bars(findings, f"The first {kept} layers retrieve {before:.2f}, one layer fewer {last:.2f}", path)


STUDY = MinimalModel
