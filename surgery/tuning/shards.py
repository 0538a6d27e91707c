"""FSDP2 and ZeRO: every process holds a part of each tensor, or of the optimizer's state of it.

A copy of the module is divided, which shares the model's tensors until then. The model itself stays whole, and gets the trained
values when a checkpoint is written and at the end. So it is exported as if nothing had been divided.

torch.distributed.checkpoint.state_dict could gather and scatter the state of FSDP's optimizers, but not of DeepSpeed's, and
takes an optimizer step of its own whenever a state is loaded; here it is two calls of DTensor's own functions.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from surgery.errors import UserError
from surgery.runtime.processes import gather
from surgery.runtime.processes import state as processes
from surgery.tuning.distil import Distillation


def divided() -> bool:
    """Whether accelerate is to divide models, by --use_fsdp, by --zero_stage 3 or by its configuration."""
    zero = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    return parse_flag_from_env("ACCELERATE_USE_FSDP") or zero


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
    with whole(learning.values()):
        for name, p in learning.items():
            trained[name].copy_(gathered(p))


@contextmanager
def whole(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within this context, parameters can be read and written, in all processes alike. Elsewhere ZeRO 3 leaves them empty."""
    emptied = [p for p in parameters if hasattr(p, "ds_id")]
    if not emptied:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(emptied, modifier_rank=0):
        yield


def gathered(tree: Any) -> Any:
    """The same tree with whole tensors. All processes have to call it."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """The state of an optimizer. All processes have to call it. DeepSpeed's optimizer reorders its parameters, so of that one
    the parts of all processes are listed side by side."""
    if (own := _inner(optimizer)) is None:
        return gathered(optimizer.state_dict())
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"rates": rates, "parts": gather([[own.state[p] for p in _held(optimizer)]])}


def load_optimizer_state(state: dict[str, Any], optimizer: Any) -> None:
    """The inverse of `optimizer_state`. Raises UserError for the state of processes that divided the model in another way."""
    own = _inner(optimizer)
    parts = state["parts"][processes().process_index] if "parts" in state else None
    sizes = None if parts is None else [values["exp_avg"].shape for values in parts]
    if sizes != (None if own is None else [p.shape for p in _held(optimizer)]):
        raise UserError("the checkpoint was made with or without DeepSpeed, or at another stage of it; tune with --overwrite")
    if own is None or parts is None:
        optimizer.load_state_dict(scattered(state, optimizer))
        return
    for group, rate in zip(optimizer.param_groups, state["rates"], strict=True):
        group["lr"] = rate
    for p, values in zip(_held(optimizer), parts, strict=True):
        own.state[p] = {name: value.to(p.device) if value.dim() else value for name, value in values.items()}


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer inside DeepSpeed's wrapper; None without DeepSpeed."""
    return optimizer.optimizer.optimizer if isinstance(optimizer, DeepSpeedOptimizerWrapper) else None


def _held(optimizer: Any) -> list[Tensor]:
    """The parts of the parameters that this process holds under DeepSpeed."""
    own = vars(optimizer.optimizer)
    return own.get("fp32_partitioned_groups_flat") or own["single_partition_of_fp32_groups"]  # of ZeRO 3, or of 1 and 2


def scattered(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The inverse of `gathered` for the state of an optimizer: every tensor is divided as its parameter is."""
    order = [p for group in optimizer.param_groups for p in group["params"]]

    def part(value: Any, p: Tensor) -> Any:
        if not (isinstance(p, DTensor) and isinstance(value, Tensor) and value.shape == p.shape):
            return value
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)

    divided = {i: {name: part(value, order[i]) for name, value in of.items()} for i, of in state["state"].items()}
    return state | {"state": divided}
