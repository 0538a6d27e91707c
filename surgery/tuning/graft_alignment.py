"""Alignment: each graft learns alone to do what the base does in its place.

A graft's block and the base's block of the same place are given the same states, those that enter it in the base, and are to
hand on the same ones. What the heads give is so compared as the rest of the model sees it: behind norm and output projection.
The states are computed once; no other block runs, forwards or backwards. A gate between SSM and attention is away meanwhile,
and all is attention: the shortest way to agree with the base would be to shut the gate.

A graft that starts from a donor's layer has nothing to learn from the donor: it is that layer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor

from surgery.families import Hybrid
from surgery.tuning.distil import Batch, Distillation
from surgery.tuning.sequences import IGNORE

# (entering, leaving, which tokens are real, position_ids where documents share rows).
Part = tuple[Tensor, Tensor, Tensor, Tensor | None]
# block -> its parts by kind of text, and the square of what the block adds to all of them.
States = dict[int, tuple[list[Part], Tensor]]


def error(distillation: Distillation, states: States) -> dict[str, Tensor]:
    """{"loss"}: the squared error of what the blocks that hold grafts add to the stream, on the states of a batch, relative to
    the square of what they should add, mean over the blocks."""
    errors = []
    for i, (parts, size) in states.items():
        block = distillation.student.base_model.layers[i]
        with distillation.autocast(parts[0][0].device):
            given = [distillation.run([block], norm=False, inputs_embeds=part[0], position_ids=part[3]) for part in parts]
        off = [_square(mine - leaving, real) for mine, (_, leaving, real, _) in zip(given, parts, strict=True)]
        errors.append(torch.stack(off).sum() / size)
    return {"loss": torch.stack(errors).mean()}


def gather(distillation: Distillation, batches: Iterable[Batch], most: int, accelerator: Accelerator) -> list[States]:
    """The states of at least one batch, and of as many as `most` bytes hold in all processes together; each holds those of its
    share of a batch, and the mean over the processes of the square of what all of them add."""
    found: list[States] = []
    held = 0.0
    for (ids, targets), text in batches:
        real = (targets != IGNORE).flip(1).cumsum(1).flip(1) > 0  # up to the last one asked for
        parts: dict[int, list[Part]] = {}
        for tokens, which, places in [(ids, real, None)] + ([] if text is None else [text]):
            for i, entering, leaving in distillation.block_states(tokens, places):
                parts.setdefault(i, []).append((entering, leaving, which, places))
        squares = {i: [_square(leaving - entering, real) for entering, leaving, real, _ in parts[i]] for i in parts}
        mine = sum(m.nbytes for some in parts.values() for part in some for m in part if m is not None)
        held += accelerator.reduce(torch.tensor(float(mine), device=ids.device), "sum").item()
        sizes = accelerator.reduce({i: torch.stack(of).sum() for i, of in squares.items()}, "mean")
        if found and held > most:
            break
        found.append({i: (parts[i], sizes[i]) for i in parts})
    return found


@contextmanager
def without_gates(model: Hybrid) -> Iterator[None]:
    """A hybrid whose grafts are attention alone. Their gates are no parameters of it meanwhile."""
    mixers = [block.mixer for block in model.base_model.layers]
    gated = [mixer for mixer in mixers if getattr(getattr(mixer, "graft", None), "gate", None) is not None]
    own = [(mixer.graft.gate, mixer.ssm_heads) for mixer in gated]
    try:
        for mixer in gated:
            mixer.ssm_heads = [head for head in mixer.ssm_heads if head not in mixer.graft.heads]
            mixer.graft.gate = None
        yield
    finally:
        for mixer, (gate, heads) in zip(gated, own, strict=True):
            mixer.graft.gate, mixer.ssm_heads = gate, heads


def _square(difference: Tensor, real: Tensor) -> Tensor:
    return difference[real].float().square().sum()
