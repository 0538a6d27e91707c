"""Every layer in turn from a donor, without training: where does attention help? (arXiv 2504.18574, hybrid replacement.)

A layer that has been aligned with the donor's (Llamba's, from Llama) can be swapped for it: mixer, norms and MLP. Where
retrieval rises, the donor's attention does what the SSM in its place could not.
"""

from collections.abc import Iterable

from transformers import PreTrainedModel

from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.runtime.progress import Track
from surgery.splicing.splice import install
from surgery.studies.prune import PruneOutcome, Pruner


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
