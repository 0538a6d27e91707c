"""Crucial layers: leave out each layer of the minimal model in turn. Few of them are crucial to retrieval."""

from pathlib import Path
from typing import ClassVar

from surgery.studies.figures import draw_bars, retrieved
from surgery.studies.prune import leave_one_out
from surgery.studies.study import Findings, Measurements, Study, Subjects, change, rows


class CrucialLayers(Study):
    """minimal: the number of layers of the minimal model. By default it is determined by dropping layers."""

    title: ClassVar[str] = "Crucial layers: the minimal model without each of its layers"
    published: ClassVar[str] = (
        "The last two layers of Llama-3.1-8B's minimal model, L16 and L17, are the crucial ones: they hold the gather head and "
        "the aggregate head."
    )

    minimal: int | None = None

    def measure(self, subjects: Subjects) -> Measurements:
        minimal, whole = subjects.minimal_model(self.minimal)
        cuts = leave_one_out(subjects.pruner, minimal)
        worst = sorted(cuts, key=lambda cut: cut.retrieval.accuracy.accuracy)[:2]
        named = "; ".join(f"without L{cut.dropped[0]} {change(whole, cut)}" for cut in worst)
        return Measurements(
            about={"minimal": minimal, "crucial": [cut.dropped[0] for cut in worst]},
            summary=f"The layers whose loss costs most retrieval: {named}.",
            rows=rows([whole, *cuts]),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        whole, *cuts = retrieved(findings)
        draw_bars(findings, f"Retrieval {whole:.2f}; without any one layer at most {max(cuts):.2f}", path)


STUDY = CrucialLayers
