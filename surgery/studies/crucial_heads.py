"""Crucial heads: in the layers of the gather and aggregate heads, keep only those heads, only those of one role, or none."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from surgery.records.site import Site
from surgery.studies.figures import draw_bars, retrieved
from surgery.studies.prune import keep_only
from surgery.studies.study import Findings, Measurements, OfHeads, Subjects, change, rows


class CrucialHeads(OfHeads):
    """minimal: the number of layers of the minimal model. The heads are kept in that model, because later layers may stand in
    for lost ones. By default it is determined by dropping layers. The other options are those of OfHeads."""

    title: ClassVar[str] = "Crucial heads: what a few heads of their layers are worth"
    published: ClassVar[str] = (
        "Llama-3.1-8B: L16.H22 gathers and L17.H24 aggregates (Llamba-8B: L16.H10; L17.H3,9). A single one of them disabled "
        "in the pruned model takes MMLU from 66% to 25%, which is chance."
    )

    minimal: int | None = Field(default=None, ge=1)

    def measure(self, subjects: Subjects) -> Measurements:
        gather, aggregate = self.heads(subjects).values()
        minimal, whole = subjects.minimal_model(self.minimal, (*gather, *aggregate))
        kept = keep_only(subjects.pruner, gather, aggregate, minimal)
        return Measurements(
            about={"gather": list(map(str, gather)), "aggregate": list(map(str, aggregate)), "minimal": minimal},
            summary=(
                f"Gather {_names(gather)}; aggregate {_names(aggregate)}. "
                f"These alone kept in their layers: {change(whole, kept['both'])}; none kept: {change(whole, kept['neither'])}."
            ),
            rows=rows([whole, *kept.values()]),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        whole, both, *_, neither = retrieved(findings)
        draw_bars(findings, f"Retrieval {whole:.2f}; only gather and aggregate heads {both:.2f}, neither {neither:.2f}", path)


def _names(sites: tuple[Site, ...]) -> str:
    return ", ".join(map(str, sites)) or "none found"


STUDY = CrucialHeads
