"""What a student and its teacher share: which modules are the same in both, a backbone with other blocks in it for a while, and
the states that both compute."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from surgery.models.offloaded import same_tensors


class StateCache:
    """Tensors by key, of `limit` bytes together at most. What does not fit is computed again whenever it is needed."""

    def __init__(self, limit: int):
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


def around_blocks(student: Any, teacher: Any) -> list[tuple[nn.Module, nn.Module]]:
    """The pairs of embeddings, last norms and heads."""
    ours, theirs = (
        (
            m.get_input_embeddings(),
            getattr(m.base_model, getattr(m.base_model, "last_norm", ""), None),
            m.get_output_embeddings(),
        )
        for m in (student, teacher)
    )
    return list(zip(ours, theirs, strict=True))


def is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def coincide(ours: nn.Module, theirs: nn.Module | None) -> bool:
    """Whether a module of the student and one of the teacher compute the same, now and after training."""
    if type(ours) is not type(theirs) or theirs is None or is_trained(ours):
        return False
    return same_tensors(ours, theirs)


@contextmanager
def arranged(decoder: Any, blocks: Sequence[nn.Module], norm: bool) -> Iterator[None]:
    """Put other blocks into a backbone for a while; its last norm is left out unless `norm` is True."""
    layers, last = decoder.layers, getattr(decoder, decoder.last_norm)
    try:
        decoder.layers = nn.ModuleList(blocks)
        if not norm:
            setattr(decoder, decoder.last_norm, nn.Identity())
        yield
    finally:
        decoder.layers = layers
        setattr(decoder, decoder.last_norm, last)
