"""Models whose weights accelerate keeps on the CPU or the disk, and fetches whenever the module that owns them is called.

Such a weight lies on the meta device. Its value is in the map that its module's hook holds (on a disk: read when it is asked
for). A hybrid has modules of its own and the hooks of its base: the same maps, so that no weight is held twice.
"""

from collections import ChainMap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.hybrids.parts import take_hook
from surgery.hybrids.patching import note_of, set_note
from surgery.models.answers import fetching_hooks, own_fetched


def is_offloaded(model: nn.Module) -> bool:
    """Whether some of a model's weights have to be fetched."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())) and bool(hooks(model))


def hooks(model: nn.Module) -> dict[str, Any]:
    """accelerate's hooks by the names of their modules; of a hybrid, those of its base."""
    own = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    return note_of(model, "base_hooks", {}) | own  # some belong to modules that layer grafts have replaced


def take_hooks(source: nn.Module, target: nn.Module) -> None:
    """Let `target` fetch what `source` fetches, from the same place, and run where it runs: module by module, by name.

    Raises UserError for hooks that fetch whole modules at once (preload_module_classes): they know no grafts.
    """
    modules, shared = dict(target.named_modules()), hooks(source)
    for name, hook in shared.items():
        if any(part.place_submodules for part in fetching_hooks(hook)):
            raise UserError(f"accelerate fetches '{name}' as a whole (preload_module_classes); load the model without that")
        if name in modules:
            take_hook(modules[name], hook)
    if shared:
        set_note(target, "base_hooks", shared)
    if hasattr(source, "hf_device_map"):
        target.hf_device_map = source.hf_device_map


def keep(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Let a model that took its base's hooks fetch these weights, by name, from here instead of the base's of the same name."""
    for name, tensor in weights.items():
        owner, _, leaf = name.rpartition(".")
        for hook in fetching_hooks(getattr(model.get_submodule(owner), "_hf_hook", None)):
            hook.weights_map = ChainMap({leaf: tensor}, hook.weights_map)


def device_of(module: nn.Module, tensor: Tensor) -> torch.device:
    """Where a tensor of a module is used: where it lies, or where it is fetched to."""
    for hook in fetching_hooks(getattr(module, "_hf_hook", None)) if tensor.is_meta else ():
        device = hook.execution_device
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return tensor.device


def placeholder(tensor: Tensor) -> Tensor:
    """A tensor on the meta device for another model's module: accelerate exchanges it when the module is called."""
    empty = torch.empty_like(tensor)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@contextmanager
def fetched(module: nn.Module) -> Iterator[None]:
    """While this lasts, the tensors of a module and of all its parts have values."""
    with ExitStack() as after:
        for part in module.modules():
            after.enter_context(own_fetched(part))
        yield


def same_tensors(first: nn.Module, second: nn.Module) -> bool:
    """Whether two modules hold the same parameters, by name and value; what both fetch from one place is not fetched."""
    names = [name for name, _ in first.named_parameters()]
    if names != [name for name, _ in second.named_parameters()]:
        return False
    return all(same_tensor(first, second, name) for name in names)


def same_tensor(first: nn.Module, second: nn.Module, name: str) -> bool:
    """The same of one parameter."""
    if (own := first.get_parameter(name)) is (other := second.get_parameter(name)):
        return True
    if not (own.is_meta or other.is_meta):
        return torch.equal(own, other)
    owner, _, leaf = name.rpartition(".")
    modules = first.get_submodule(owner), second.get_submodule(owner)
    ours, theirs = ([hook.weights_map for hook in fetching_hooks(getattr(module, "_hf_hook", None))] for module in modules)
    if ours and len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True)):
        return True
    with own_fetched(modules[0]), own_fetched(modules[1]):
        return torch.equal(getattr(modules[0], leaf), getattr(modules[1], leaf))
