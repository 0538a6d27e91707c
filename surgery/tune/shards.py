"""FSDP2: every process holds a part of each tensor.

What is divided is a copy of the module that shares the tensors of the model until then. The model itself stays as it was given,
and gets what was trained when a checkpoint is written and at the end: so it is exported as if nothing had been divided.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from surgery.tune.distil import Distillation


def divided() -> bool:
    """Whether accelerate was asked to divide models, by `accelerate launch --use_fsdp` or its configuration."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def apart(module: nn.Module) -> nn.Module:
    """A copy of a Distillation to divide, by its blocks. Its student shares no parameter with its teacher, since FSDP takes a
    parameter to belong to one block."""
    assert isinstance(module, Distillation)
    own: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    copied = copy.deepcopy(module, own)
    for part in filter(None, (copied.teacher, copied.other_blocks)):
        again: dict[nn.Parameter, nn.Parameter] = {}
        for owner in part.modules():
            for name, p in owner._parameters.items():
                if p is not None:
                    owner._parameters[name] = again.setdefault(p, nn.Parameter(p.detach(), requires_grad=False))
    vars(copied)["_no_split_modules"] = sorted({type(block).__name__ for block in copied.student.base_model.layers})
    return copied


@torch.no_grad()
def collect(learning: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]) -> None:
    """Write what the processes learned, each a part, into the whole model's parameters. All processes have to call it."""
    for name, p in trained.items():
        p.copy_(gathered(learning[name]))


def gathered(tree: Any) -> Any:
    """The same with whole tensors. All processes have to call it."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


def scattered(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The inverse of `gathered` for the state of an optimizer: each tensor divided as its parameter is."""
    order = [p for group in optimizer.param_groups for p in group["params"]]

    def part(value: Any, p: Tensor) -> Any:
        if not (isinstance(p, DTensor) and isinstance(value, Tensor) and value.shape == p.shape):
            return value
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)

    divided = {i: {name: part(value, order[i]) for name, value in of.items()} for i, of in state["state"].items()}
    return state | {"state": divided}
