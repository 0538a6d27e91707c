"""How layer grafts start: from a donor, or at random."""

import torch
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families.dual_start import generator
from surgery.hybrids.layer_graft import LayerGraft, layer_spec
from surgery.records.plan import Plan
from surgery.splicing.donor import DonorLayer, donor_layer


def check_donor(plan: Plan, donor: PreTrainedModel | None) -> None:
    """Raise UserError if the plan asks for a donor that is not given, or does not ask for one that is."""
    if plan.init == "donor" and donor is None:
        raise UserError(f"the plan's grafts start from a donor{f' ({plan.donor})' if plan.donor else ''}, and none is given")
    if plan.init != "donor" and donor is not None:
        raise UserError(f"a donor is given, but the plan's grafts start {plan.init}")


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
