"""How grafts start that do not start from the base's own weights: from a donor, or at random."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families import family_of
from surgery.families.dual_start import generator, start_gate, widen
from surgery.hybrids.layer_graft import LayerGraft, layer_spec
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.splicing.donor import DonorHead, DonorLayer, donor_head, donor_layer


def check_donor(base: PreTrainedModel, plan: Plan, donor: PreTrainedModel | None) -> None:
    """Raise UserError if the plan asks for a donor that is not given, or does not ask for one that is, or cannot have one."""
    if plan.init == "donor" and donor is None:
        raise UserError(f"the plan's grafts start from a donor{f' ({plan.donor})' if plan.donor else ''}, and none is given")
    if plan.init != "donor" and donor is not None:
        raise UserError(f"a donor is given, but the plan's grafts start {plan.init}")
    if plan.init == "donor" and plan.kind == "head" and not family_of(base.config).donor_heads:
        raise UserError(
            f"a donor's head does not fit a head graft of {base.config.model_type}, whose queries and keys are not made from "
            f"the layer's input; graft the whole layer instead (kind: layer)"
        )


def layer_start(base: PreTrainedModel, plan: Plan, donor: PreTrainedModel | None, layer: int) -> DonorLayer:
    """What the layer graft of a layer is and starts from; without a donor no tensors, and plain attention as wide as the base.

    Without a donor it has no positions: the SSMs around it know them, as in Jamba and NemotronH, which so can hold it.
    """
    hidden = base.config.hidden_size
    if donor is None:
        width = plan.width or max(width for width in range(1, 65) if hidden % width == 0)
        if hidden % width:
            raise UserError(f"heads of width {width} do not divide the base's hidden size, {hidden}")
        return DonorLayer(layer_spec(layer, hidden // width, width), {})
    taken = donor_layer(donor, plan.donor_layer(layer), hidden, mlp=plan.mlp)
    return DonorLayer(taken.spec | {"layer": layer}, taken.tensors)


@torch.no_grad()
def fill_layer(graft: LayerGraft, start: DonorLayer, plan: Plan) -> None:
    """Give a layer graft its first weights. At random: such that every projection keeps the size of what it is given."""
    if start.tensors:
        parameters = dict(graft.named_parameters())
        assert parameters.keys() == start.tensors.keys()  # spec and tensors are of the same donor
        for name, parameter in parameters.items():
            parameter.copy_(start.tensors[name])
        return
    random = generator(plan, graft.layer_idx)
    for module in (graft.q_proj, graft.k_proj, graft.v_proj, graft.o_proj):
        values = torch.randn(module.weight.shape, generator=random) * module.in_features**-0.5
        module.weight.copy_(values)


def head_starts(base: PreTrainedModel, plan: Plan, donor: PreTrainedModel) -> tuple[dict[Site, DonorHead], int]:
    """The donor's head for every head of the plan, and the width of the graft. Raises UserError where one does not fit."""
    heads = [head for site in plan.sites for head in site.each()]
    hidden = base.config.hidden_size
    of_site = {head: donor_head(donor, plan.donor_head(head.layer, head.heads[0]), hidden) for head in heads}
    needed = max(len(start.q) for start in of_site.values())
    if plan.width is not None and plan.width < needed:
        raise UserError(f"the donor's heads are {needed} wide, and the plan's queries and keys {plan.width}")
    return of_site, plan.width or needed


@torch.no_grad()
def fill_heads(mixer: Any, plan: Plan, of_site: dict[Site, DonorHead]) -> None:
    """Give a head graft the queries and keys of donor heads. Dimensions beyond theirs have random queries and zero keys, which
    add exactly nothing to the scores."""
    graft, layer = mixer.graft, mixer.layer_idx
    starts = [of_site[Site(layer, (head,))] for head in graft.heads]
    random = generator(plan, layer)
    taus = [plan.start(layer, head).tau * start.scale for head, start in zip(graft.heads, starts, strict=True)]
    graft.log_tau.copy_(torch.tensor(taus).log())
    start_gate(graft, plan)
    for proj, rows in ((graft.q_proj, [start.q for start in starts]), (graft.k_proj, [start.k for start in starts])):
        spread = rows[0].std().item() if proj is graft.q_proj else 0.0
        stacked = torch.stack(rows).to(proj.weight)
        widen(proj.weight, stacked, list(range(len(rows))), spread, random)
        if proj.bias is not None:
            nn.init.zeros_(proj.bias)
