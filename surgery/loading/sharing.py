"""A model that is opened beside another: what both have, bit for bit, is held once.

The folder of a hybrid holds its base's tensors once more. Its files are compared with the tensors of the model that is open
already, some at a time and through a map of their own, which is then let go. So what is equal is not even read into memory
twice, where a file holds tensors as the model does.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.families import families
from surgery.models.offloaded import hooks
from surgery.models.quantised import is_quantised

PART = 2**26  # bytes of a file that are mapped at once
Place = tuple[torch.device, int, torch.Size, tuple[int, ...]]  # of a tensor: its memory, and how it lies there
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def shareable(model: PreTrainedModel) -> bool:
    """Whether a model's tensors may be those of another one: they are neither quantised, which gives a meaning to them in their
    own modules alone, nor placed by accelerate."""
    return not (is_quantised(model) or hooks(model) or hasattr(model, "hf_device_map"))


def share_equal(model: PreTrainedModel, other: PreTrainedModel, folder: Path) -> None:
    """Let `model`, which was just opened from `folder` on the CPU, use the tensors of `other`, on any device, that have the
    same name, dtype, shape and bits. Its parameters stay its own: they learn, or are frozen, apart from those of `other`."""
    if not (shareable(model) and shareable(other)):
        return
    theirs = _tensors(other)
    alike = {
        name: (tensor, theirs[name])
        for name, tensor in _tensors(model).items()
        if name in theirs and tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape
        if not (tensor.is_meta or theirs[name].is_meta)
    }
    known = dict(_in_files(folder, alike)) if model.config.model_type in families() else {}
    equal = {
        name: other_tensor
        for name, (tensor, other_tensor) in alike.items()
        if (known[name] if name in known else same_bits(tensor, other_tensor))
    }
    exchanged = _exchange(model, equal)
    own = {id(tensor): tensor for tensor in _tensors(model).values() if _place(tensor) not in exchanged}
    if sum(tensor.nbytes for tensor in own.values()) <= sum(exchanged.values()):  # of a few tensors the map would hold a file
        _copy_out(list(own.values()))


def is_all_in(model: PreTrainedModel, dtype: torch.dtype | None) -> bool:
    """Whether all of a model's tensors in floating point have this dtype."""
    return all(tensor.dtype == dtype for tensor in _tensors(model).values() if tensor.is_floating_point())


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits; compared where the second lies."""
    kind = INTEGERS.get(first.element_size())
    if kind is None:
        return False
    return torch.equal(first.detach().to(second.device).view(kind), second.detach().view(kind)) if first.dim() else (
        same_bits(first.detach()[None], second.detach()[None])
    )  # fmt: skip


def own_bytes(model: nn.Module, *others: nn.Module) -> int:
    """The bytes of the tensors in memory that a model does not have in common with any of the others."""
    theirs = {_place(tensor) for other in others for tensor in _tensors(other).values()}
    own = {_place(tensor): tensor.nbytes for tensor in _tensors(model).values() if not tensor.is_meta}
    return sum(size for place, size in own.items() if place not in theirs)


def _place(tensor: Tensor) -> Place:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def _in_files(folder: Path, alike: dict[str, tuple[Tensor, Tensor]]) -> Iterator[tuple[str, bool]]:
    """For every tensor that a file of the folder holds under its name, as the model has it: whether it is the other one's."""
    for file in _files(folder):
        with safe_open(file, framework="pt") as names:
            held = [name for name in names.keys() if name in alike]  # noqa: SIM118
        while held:
            size, taken = 0, list[str]()
            while held and (not taken or size + alike[held[0]][0].nbytes <= PART):
                size += alike[held[0]][0].nbytes
                taken.append(held.pop(0))
            with safe_open(file, framework="pt") as tensors:
                for name in taken:
                    own, other = alike[name]
                    stored = tensors.get_tensor(name)
                    if stored.dtype == own.dtype and stored.shape == own.shape:
                        yield name, same_bits(stored, other)
                    del stored


def _files(folder: Path) -> list[Path]:
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists():
        return [whole]
    if not index.exists():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _exchange(model: nn.Module, equal: dict[str, Tensor]) -> dict[Place, int]:
    """Put other tensors in the place of a model's own, and return where these lie and their bytes. Weights that are tied stay
    so, and no others become so."""
    exchanged: dict[Place, int] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, p in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if id(p) not in parameters:
            if name not in equal or _place(equal[name]) in exchanged:
                continue
            parameters[id(p)] = nn.Parameter(equal[name].detach(), p.requires_grad)
            exchanged[_place(equal[name])] = equal[name].nbytes
        setattr(model.get_submodule(owner), leaf, parameters[id(p)])
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        if name in equal:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = equal[name]
            exchanged[_place(equal[name])] = equal[name].nbytes
    return exchanged


def _copy_out(tensors: list[Tensor]) -> None:
    """Copy what is left of a model's own tensors out of its file's map, which can then be let go."""
    copies: dict[Place, Tensor] = {}
    for tensor in tensors:
        tensor.data = copies.setdefault(_place(tensor), tensor.detach().clone())
