"""How many questions splice attribution takes at a time, and what it keeps of them, so that it fits beside the weights.

Backward goes through all layers, from the last to the first, so the activations of all of them would be kept: of a 7B model
about 6 GB a question of 300 tokens. Where they do not fit, only what enters each block is kept, and the block is computed once
more on the way back: then it is what enters the blocks, and the activations of one. This changes no bit of the result. Where a
whole batch does not fit even so, fewer questions are taken at a time, which changes rounding alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from surgery.hybrids.patching import replaced
from surgery.locating.subject import Subject
from surgery.locating.substitution import Shape, tensor_of
from surgery.probes.encoded import Encoded

SHARE = 0.4  # of the memory that is free, for activations: scores, and what else runs, need some as well
# Of one block's activations, what its forward and its attention on the way back take beside them. Measured: .8 to 1.9.
TRANSIENT = 2

Listen = Callable[[int, Any, Tensor, tuple[Any, ...], dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Step:
    """rows: at most so many of a batch are taken at a time; None: all. checkpointed: only what enters a block is kept."""

    rows: int | None = None
    checkpointed: bool = False


WHOLE = Step()


@dataclass(frozen=True)
class Activations:
    """Bytes that one token leaves for the way back. entering: what enters all blocks. all_blocks: what all blocks keep.
    block: what the one that keeps most does."""

    entering: float
    all_blocks: float
    block: float

    def step(self, encoded: Encoded, free: int, *, whole: bool) -> Step:
        """What is done at a time where so many bytes are free. whole: the batch is not divided, fit or not."""
        rows, tokens = len(encoded.rows), max(map(len, encoded.rows))
        if rows * tokens * (self.all_blocks + TRANSIENT * self.block) <= SHARE * free:
            return WHOLE
        a_row = tokens * (self.entering + (1 + TRANSIENT) * self.block)
        return Step(None if whole else max(1, min(rows, int(SHARE * free / a_row))), checkpointed=True)

    def bytes(self, encoded: Encoded, step: Step) -> float:
        """What a step of a batch keeps at once."""
        rows, tokens = step.rows or len(encoded.rows), max(map(len, encoded.rows))
        return rows * tokens * ((self.entering if step.checkpointed else self.all_blocks) + (1 + TRANSIENT) * self.block)


def activations(gated: Subject, row: Sequence[int]) -> Activations:
    """Measured on one row of tokens, a block after the other. gated: walk.fully_gated."""
    model, parameters = gated.model, {parameter.untyped_storage().data_ptr() for parameter in gated.model.parameters()}
    entering, sizes = 0, []
    kept: dict[int, torch.UntypedStorage] = {}  # of one block

    def listen(_layer: int, _mixer: Any, y: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        # What attention waits for on the way back, and what it is compared with.
        projected, *others = args
        for tensor in (y, *vars(projected).values(), *others, *kwargs.values()):
            keep(tensor)
        return y.detach().requires_grad_()

    def keep(tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    def measured(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal entering
        entering += hidden.nbytes
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            returned = forward(hidden.detach().requires_grad_(), *args, **kwargs)
        left = Shape.of(returned).around(tensor_of(returned).detach())
        sizes.append(sum(storage.nbytes() for storage in kept.values()))
        kept.clear()
        return left

    blocks: dict[nn.Module, Callable[..., Any]] = {
        block: partial(measured, block.forward) for block in gated.anatomy.blocks
    }  # fmt: skip
    ids = torch.tensor([list(row)], device=model.device)
    with torch.no_grad(), intercept_ssm_output([mixer.module for mixer in gated.anatomy.ssms], listen), replaced(blocks):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return Activations(entering / len(row), sum(sizes) / len(row), max(sizes) / len(row))


@contextmanager
def intercept_ssm_output(mixers: Sequence[Any], listen: Listen, *, always: bool = False) -> Iterator[None]:
    """Mixers that compute no attention: where a mixer would blend the SSM's output y with it, listen(its number, the mixer, y,
    what attend takes) says what comes instead of y. Without gradients, as when a block is computed for the first of two times,
    y passes, and nothing is kept, unless `always`."""

    def others(number: int, mixer: Any) -> dict[tuple[Any, str], Any]:
        waiting: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def deferred_attend(*args: Any, **kwargs: Any) -> Tensor:
            waiting.append((args, kwargs))
            return args[0].values.new_zeros(())  # nobody looks at it

        def blend(y: Tensor, _: Tensor) -> Tensor:
            args, kwargs = waiting.pop()
            return listen(number, mixer, y, args, kwargs) if always or torch.is_grad_enabled() else y

        return {(mixer, "attend"): deferred_attend, (mixer.graft, "blend"): blend}

    methods = {key: method for number, mixer in enumerate(mixers) for key, method in others(number, mixer).items()}
    with replaced(methods):
        yield


def parted(encoded: Encoded, rows: int | None) -> list[Encoded]:
    """A batch in parts of at most so many rows, in order; a question that owns more is one part."""
    if rows is None or len(encoded.rows) <= rows:
        return [encoded]
    owners, parts, begin, count = encoded.owners(), [], 0, 0
    for question, size in enumerate(owners.bincount(minlength=len(encoded)).tolist()):
        if count and count + size > rows:
            parts.append(encoded.part(begin, question))
            begin, count = question, 0
        count += size
    return [*parts, encoded.part(begin, len(encoded))]
