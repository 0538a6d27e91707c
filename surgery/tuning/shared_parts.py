"""What a student and its teacher share: which modules are the same in both, and the states that both compute."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from surgery.loading.digests import function_of
from surgery.models.anatomy import block_list
from surgery.models.offloaded import same_tensor, same_tensors
from surgery.splicing.state import FIELDS as STATE_SIZES

KEPT_BYTES = 2**30  # of what is kept for batches that come again


class StateCache:
    """Tensors by key, of `limit` bytes together at most. What does not fit is computed again whenever it is needed."""

    def __init__(self, limit: int = KEPT_BYTES):
        self.limit, self.bytes, self.tensors = limit, 0, dict[Any, Tensor]()

    def get(self, key: tuple[Any, str], compute: Callable[[], Tensor]) -> Tensor:
        """key: (the batch, or None if it does not come again; which of its tensors)."""
        if key in self.tensors:
            return self.tensors[key]
        tensor = compute()
        if key[0] is not None and self.bytes + tensor.nbytes <= self.limit:
            self.tensors[key] = tensor
            self.bytes += tensor.nbytes
        return tensor


def blocks_of(model: Any) -> list[nn.Module]:
    return list(getattr(model.base_model, "layers", ()))


def alike_around(student: Any, teacher: Any) -> bool:
    """Whether a student and its teacher compute the same outside their blocks, now and after training."""
    if type(student.base_model) is not type(teacher.base_model) or _function(student) != _function(teacher):
        return False
    ours, theirs = (_outside(model) for model in (student, teacher))
    return ours == theirs and not any(
        student.get_parameter(name).requires_grad or not same_tensor(student, teacher, name) for name in ours
    )


def _function(model: Any) -> dict[str, Any]:
    """What is done to states, but for what is the mixers' own."""
    return {name: value for name, value in function_of(model.config).items() if name not in ("grafts", *STATE_SIZES)}


def _outside(model: Any) -> list[str]:
    """The names of the parameters that are in no block."""
    blocks = {id(p) for p in block_list(model).parameters()}
    return [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in blocks]


def is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def same_tensors_and_type(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether a module of the student and one of the teacher compute the same, now and after training."""
    if type(ours) is not type(theirs) or is_trained(ours):
        return False
    return same_tensors(ours, theirs) and _windows(ours) == _windows(theirs)


def _windows(module: nn.Module) -> list[Any]:
    """Of the attention in it (hybrids/windows.py): they are no tensors, and a block's class does not tell."""
    held = (vars(part).get("windows") or vars(part).get("window") for part in module.modules())
    return [windows for windows in held if windows]
