"""FSDP2: every process holds a part of each tensor, and of the optimizer's state of it.

A copy of the module is divided, which shares the model's tensors until then. The model itself stays whole, and gets the trained
values when a checkpoint is written and at the end. So it is exported as if nothing had been divided.

torch.distributed.checkpoint.state_dict could gather and scatter the optimizers' state, but takes an optimizer step of its own
whenever one is loaded; here it is two calls of DTensor's own functions.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from surgery.tuning.distil import Distillation


def divided() -> bool:
    """Whether accelerate is to divide models, by --use_fsdp or by its configuration."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def apart(distillation: Distillation) -> Distillation:
    """A copy that can be divided by its blocks. Its student shares no parameter with its teacher, because FSDP assumes that a
    parameter belongs to one block."""
    own: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in distillation.parameters()}
    copied = copy.deepcopy(distillation, own)
    for part in filter(None, (copied.teacher, copied.teacher_blocks)):
        again: dict[nn.Parameter, nn.Parameter] = {}
        for owner in part.modules():
            for name, p in owner._parameters.items():
                if p is not None:
                    owner._parameters[name] = again.setdefault(p, nn.Parameter(p.detach(), requires_grad=False))
    return copied


@torch.no_grad()
def collect(learning: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]) -> None:
    """Write the parts that the processes have learnt into the whole model's parameters. All processes have to call it."""
    for name, p in learning.items():
        trained[name].copy_(gathered(p))


def gathered(tree: Any) -> Any:
    """The same tree with whole tensors. All processes have to call it."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


def scattered(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The inverse of `gathered` for the state of an optimizer: every tensor is divided as its parameter is."""
    order = [p for group in optimizer.param_groups for p in group["params"]]

    def part(value: Any, p: Tensor) -> Any:
        if not (isinstance(p, DTensor) and isinstance(value, Tensor) and value.shape == p.shape):
            return value
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)

    divided = {i: {name: part(value, order[i]) for name, value in of.items()} for i, of in state["state"].items()}
    return state | {"state": divided}
