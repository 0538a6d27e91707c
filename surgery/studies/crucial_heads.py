"""Of the layers of the gather and aggregate heads only those heads are kept, those of one role, or none."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from surgery.errors import UserError
from surgery.locate.prune import keep_only, minimal_model, shorten
from surgery.site import Site, SiteText
from surgery.studies.figures import draw_bars
from surgery.studies.study import Findings, Found, Study, Subjects, change, rows


class CrucialHeads(Study):
    """gather, aggregate: the heads; if they are not given, the `top` of each role whose ablation costs most. minimal: how many
    layers the minimal model has, in which heads are kept, because later layers may stand in for lost ones; found by dropping
    layers if it is not given."""

    title: ClassVar[str] = "Crucial heads: what a few heads of their layers are worth"
    published: ClassVar[str] = (
        "Llama-3.1-8B: L16.H22 gathers and L17.H24 aggregates (Llamba-8B: L16.H10; L17.H3,9). A single one of them disabled "
        "in the pruned model takes MMLU from 66% to 25%, which is chance."
    )

    gather: tuple[SiteText, ...] | None = None
    aggregate: tuple[SiteText, ...] | None = None
    top: int = Field(default=1, ge=1)
    minimal: int | None = Field(default=None, ge=1)

    def measure(self, subjects: Subjects) -> Found:
        gather = subjects.heads("gather", self.gather, self.top)
        aggregate = subjects.heads("aggregate", self.aggregate, self.top)
        if not gather and not aggregate:
            raise UserError("locate gave no head a role; name them with study.gather and study.aggregate")
        subject = subjects.subject
        minimal = max(
            self.minimal or minimal_model(subject, shorten(subject)), *(site.layer + 1 for site in (*gather, *aggregate))
        )
        whole = subject.cut("minimal model", dropped=range(minimal, len(subject.anatomy.blocks)))
        kept = keep_only(subject, gather, aggregate, minimal)
        return Found(
            about={"gather": list(map(str, gather)), "aggregate": list(map(str, aggregate)), "minimal": minimal},
            summary=(
                f"Gather {_names(gather)}; aggregate {_names(aggregate)}. "
                f"These alone kept in their layers: {change(whole, kept['both'])}; none kept: {change(whole, kept['neither'])}."
            ),
            rows=rows([whole, *kept.values()]),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects) -> None:
        draw_bars(findings, self.title, path)


def _names(sites: tuple[Site, ...]) -> str:
    return ", ".join(map(str, sites)) or "none found"


STUDY = CrucialHeads
