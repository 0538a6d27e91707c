"""A model in float32 without a copy of its weights: each is converted when its module is called, and released after it.

What is held beyond the model itself is the weights of the module that computes, a few hundred megabytes at seven billion
parameters. Every forward converts all weights anew, so it is slower than a copy in float32 where there is room for one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import cpu_offload
from torch import Tensor
from transformers import PreTrainedModel

from surgery.families import family_of
from surgery.models.answers import is_away, named_values, scales

AT_ONCE = 2**29  # bytes of mapped pages that are kept


def by_layers(hybrid: PreTrainedModel) -> PreTrainedModel:
    """A hybrid (or a base) that computes on the CPU in float32 with the weights of this one, which stay where they are and as
    they are."""
    streamed = emptied(hybrid).float()
    streamed.generation_config = hybrid.generation_config
    take_buffers(streamed, hybrid)
    return cpu_offload(streamed, torch.device("cpu"), state_dict=Live(hybrid))


def take_buffers(emptied: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give a model without values the buffers of its original, on the CPU, and in float32: accelerate wants them here, also
    those that a checkpoint holds (MiniMax's decays)."""
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        # One without values is used by nobody.
        values = torch.zeros_like(buffer, device="cpu") if is_away(buffer) else buffer.detach().cpu()
        emptied.get_submodule(owner)._buffers[leaf] = values.float() if values.is_floating_point() else values


def emptied(model: PreTrainedModel) -> PreTrainedModel:
    """A hybrid, or a base, of the same configuration, without values in its tensors (on the meta device)."""
    family, grafts = family_of(model.config), getattr(model.config, "grafts", None)
    return family.empty_base(model.config) if grafts is None else family.empty(model.config, None, grafts)


class Live(Mapping[str, Tensor]):
    """The tensors of a model by the names of its state_dict, on the CPU, also those that it fetches itself."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.names = model, list(model.state_dict())
        self.tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self.scales = scales(model)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.scales:
            return self.scales[name].detach().cpu()
        owner, _, leaf = name.rpartition(".")
        if is_away(getattr(self.model.get_submodule(owner), leaf)):
            name = self.tied.get(name, name)
        return next(tensor.detach().cpu() for _, tensor in named_values(self.model, [name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Reopened(Mapping[str, Tensor]):
    """Tensors that are mapped from files. The files are opened anew after every AT_ONCE bytes that were read, which releases
    the pages of what was read before."""

    def __init__(self, read: Callable[[], dict[str, Tensor]]):
        self.read, self.taken = read, 0
        self.state: dict[str, Tensor] | None = None
        self.names = list(read())

    def __getitem__(self, name: str) -> Tensor:
        if self.state is None or self.taken > AT_ONCE:
            self.state = None  # first, or both would be mapped
            self.state, self.taken = self.read(), 0
        self.taken += self.state[name].nbytes
        return self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def mapped(model: Any, read: Callable[[], dict[str, Tensor]]) -> PreTrainedModel:
    """The model, its tensors to be fetched from files whenever their module is called. read: opens these, and gives the tensors
    by the names of its state_dict."""
    return cpu_offload(model, torch.device("cpu"), state_dict=Reopened(read))
