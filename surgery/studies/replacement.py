"""Replacement: each layer in turn comes from a donor, untrained. Retrieval returns where the donor's attention aggregates.

A layer that has been aligned with the donor's (Llamba's, from Llama) can be swapped for it: mixer, norms and MLP. Where
retrieval rises, the donor's attention does what the SSM in its place could not (arXiv 2504.18574, hybrid replacement).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedModel

from surgery.locating.ranking import Ranking
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.runtime.progress import Track
from surgery.splicing.splice import install
from surgery.studies.figures import draw_bars, retrieved
from surgery.studies.prune import PruneOutcome, Pruner
from surgery.studies.study import Findings, Measurements, Study, Subjects, change, rows


class Replacement(Study):
    """other: the donor. mlp: whether the MLP and the norms of its layer come too."""

    title: ClassVar[str] = "Each layer replaced by the donor's"
    published: ClassVar[str] = (
        "Unaligned Llamba-8B with block 17 from Llama-3.1-8B: MMLU rises from 33 to 50 without training; most other blocks "
        "change little or harm. (An independent replication on a subset of MMLU: L17 .514, L14 .415, L13 .393, L18 .382, "
        "L23 .370.)"
    )

    other: str
    mlp: bool = True

    def measure(self, subjects: Subjects) -> Measurements:
        assert subjects.other is not None
        named = leading_layers(subjects.ranking)  # before the sweep
        outcomes = replacement_sweep(subjects.pruner, subjects.other.model, mlp=self.mlp)
        whole = subjects.pruner.base
        by = ", ".join(f"L{layer} by {measure}" for measure, layer in named.items())
        best = min(outcomes, key=lambda outcome: outcome.retrieval.drop.value)
        return Measurements(
            about={"named": named, "best": best.replaced[0]},
            summary=(
                f"Ranked before the sweep, locate names {by}. The largest gain is at L{best.replaced[0]}: "
                f"{change(whole, best)}."
            ),
            rows=rows([whole, *outcomes]),
        )

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        whole, *cuts = retrieved(findings)
        best = findings.about["best"]
        draw_bars(findings, f"Layer {best} from the donor raises retrieval from {whole:.2f} to {max(cuts):.2f}", path)


def replacement_sweep(
    pruner: Pruner, donor: PreTrainedModel, *, mlp: bool = True, layers: Iterable[int] | None = None
) -> tuple[PruneOutcome, ...]:
    """The pruner's subject with each of `layers` (default: all) from the donor's layer of the same number; with mlp, its MLP
    and norms too. Raises UserError if a layer of the donor does not fit."""
    subject = pruner.subject
    chosen = subject.anatomy.layers() if layers is None else list(layers)
    subject.anatomy.check(Site(layer) for layer in chosen)
    outcomes = []
    for layer in Track(chosen, "replacing layers"):
        plan = Plan(kind="layer", sites=(Site(layer),), donor="the donor", mlp=mlp)
        hybrid = install(subject.model, plan, donor).eval()
        measured, what = pruner.ask(hybrid), f"layer {layer} from the donor"
        retrieval, knowledge = measured["retrieval"], measured["knowledge"]
        outcomes.append(PruneOutcome(what=what, replaced=(layer,), retrieval=retrieval, knowledge=knowledge))
    return tuple(outcomes)


def leading_layers(ranking: Ranking) -> dict[str, int]:
    """The layer that each of locate's measures puts first; measures that were not taken are left out."""
    leading = {}
    measures = {"splice_loss": "the exact gain of splicing it", "ablation_loss": "what ablating it costs"}
    for field, what in {"attribution": "splice attribution", **measures}.items():
        values = {s.site.layer: score.value for s in ranking.layers if (score := getattr(s, field)) is not None}
        if values:
            leading[what] = max(values, key=lambda layer: values[layer])
    return leading


STUDY = Replacement
