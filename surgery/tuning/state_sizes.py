"""plan.state_size: which dimensions of the state stay.

Where attention retrieves, the state is left with what text needs, which is less. How much a dimension n of B and C counts is
measured by a gate on C_n, at 1, in the base with its grafts: the square of the loss's derivative by the gate, on average over
windows of text. It is what the loss would change by, to first order, without the dimension, squared so that windows do not
cancel out (Taylor importance, arXiv 1906.10771, equation 8). One backward pass a window tells it of all layers. Of each B/C
group of each layer the leading dimensions stay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families import family_of
from surgery.hybrids.mixer import Mixer, Projected
from surgery.hybrids.patching import replaced
from surgery.loading.opened import Checkpoint, model_of, plan_for
from surgery.locating.subject import Subject
from surgery.models.anatomy import mixer_at
from surgery.records.plan import Plan
from surgery.records.recipe import Data, Tune
from surgery.runtime.progress import Track
from surgery.splicing.splice import install
from surgery.splicing.state import check_cuttable, state_size
from surgery.tuning.batches import held_out_windows

WINDOWS = 32


def shrink_state(
    base: PreTrainedModel | Checkpoint, plan: Plan, size: int, *, donor: PreTrainedModel | Checkpoint | None = None,
    data: Data | None = None, text_tokens: int = 256, windows: int = WINDOWS, seed: int = 0,
) -> Plan:  # fmt: skip
    """The plan with kept_state: of each B/C group the `size` dimensions that count most. donor: as splice takes it. data: where
    the text comes from. text_tokens, windows: how long its windows are (2 at least), and how many. Raises UserError for a size
    that is not below the base's, and for a base or a plan whose state cannot be cut."""
    subject, plan = Subject.of(base, verb="shrink_state"), plan_for(plan, "shrink_state")
    if plan.kind != "head":
        raise UserError(f"plan.state_size: is for head grafts, which leave an SSM; this is kind {plan.kind}")
    for name, count, least in (("text_tokens", text_tokens, 2), ("windows", windows, 1)):
        if not isinstance(count, int) or count < least:
            raise UserError(f"surgery.shrink_state: {name} is a whole number from {least}, not {count!r}")
    whole = plan.model_copy(update={"kept_state": {}})
    hybrid = install(subject.model, whole, None if donor is None else model_of(donor, "shrink_state"))
    check_size(hybrid, size, subject.name)
    text = held_out_windows(subject.tokenizer, data or Data(), Tune(text_tokens=text_tokens), windows, seed)
    scores = state_scores(hybrid, *text)
    kept = {
        f"L{layer}": tuple(tuple(sorted(group.topk(size).indices.tolist())) for group in groups)
        for layer, groups in scores.items()
    }
    return plan.model_copy(update={"kept_state": kept})


def check_size(hybrid: PreTrainedModel, size: int, name: str) -> None:
    """Raise UserError for a hybrid, or an adopted base, whose state cannot be cut, or not be measured, and for a size that is
    not below its own. name: what the message calls it."""
    check_cuttable(hybrid)
    family: Any = family_of(hybrid.config)
    now = state_size(hybrid)
    if not isinstance(size, int) or not 1 <= size < now:
        raise UserError(f"plan.state_size: the state of {name} has {now} dimensions; {size!r} is not 1 to {now - 1}")
    if not all(isinstance(mixer_at(hybrid, layer), Mixer) for layer in family.graftable(hybrid)):
        known = "it is measured in mamba and mamba2"
        raise UserError(f"plan.state_size: which dimensions count is not measured in a {family.model_type}; {known}")


def state_scores(hybrid: PreTrainedModel, ids: Tensor, real: Tensor) -> dict[int, Tensor]:
    """Layer -> how much each dimension counts, (groups, n). ids, real: windows of text, (rows, t)."""
    embeddings: Any = hybrid.get_input_embeddings()
    device = embeddings.weight.device
    totals: dict[int, Tensor] = {}
    learning = [parameter for parameter in hybrid.parameters() if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        with torch.enable_grad(), _gated(hybrid) as gates:
            for row, mask in Track(list(zip(ids.to(device), real.to(device), strict=True)), "measuring the state"):
                logits = hybrid(input_ids=row[None], use_cache=False).logits[0, :-1].float()
                F.cross_entropy(logits[mask[1:]], row[1:][mask[1:]]).backward()
                for layer, gate in gates.items():
                    assert gate.grad is not None
                    totals[layer] = totals.get(layer, 0) + gate.grad.double() ** 2
                    gate.grad = None
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
    return {layer: total.view(-1, total.shape[-1]).cpu() / len(ids) for layer, total in totals.items()}


@contextmanager
def _gated(hybrid: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """While this lasts, C of every layer is multiplied by a gate of ones, by layer: (groups, n)."""
    gates: dict[int, Tensor] = {}
    mixers = {layer: mixer_at(hybrid, layer) for layer in family_of(hybrid.config).graftable(hybrid)}

    def gated(layer: int, own: Any) -> Any:
        def project(*args: Any, **kwargs: Any) -> Projected:
            projected = own(*args, **kwargs)
            if layer not in gates:
                gates[layer] = torch.ones_like(projected.queries[0, 0], requires_grad=True)
            return replace(projected, queries=projected.queries * gates[layer])

        return project

    with replaced({(mixer, "project"): gated(layer, mixer.project) for layer, mixer in mixers.items()}):
        yield gates
