"""Alignment: each graft learns by itself to do what the base does in its place.

A block that holds a graft gets the states that enter the same block of the base, and learns to give the states that leave it
there. So the output of the heads is compared as the rest of the model sees it, after norm and output projection. The states are
computed once, and no other block runs, neither forwards nor backwards. Gates between SSM and attention are removed meanwhile,
so that everything is attention: otherwise the easiest way to agree with the base would be to close the gate.

A graft that starts from a donor's layer has nothing to learn from the donor: it is that layer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor

from surgery.errors import UserError
from surgery.families import Hybrid
from surgery.tuning.distil import Batch, Below, Distillation
from surgery.tuning.sequences import IGNORE

Part = tuple[Below, Tensor, Tensor]  # (what enters, states that leave, which tokens are no padding)
# block -> (a Part for lessons and one for text, the squared norm of what the block adds to all of them)
States = dict[int, tuple[list[Part], Tensor]]


def alignment_error(distillation: Distillation, states: States) -> dict[str, Tensor]:
    """{"loss"}: the mean over the blocks with grafts of a relative squared error. The error is that of what a block adds to the
    residual stream, on the states of a batch, divided by the square of what it should add."""
    errors = []
    for i, (parts, size) in states.items():
        with distillation.autocast(size.device):
            outputs = [distillation.run(part[0], list(distillation.part.blocks), i, i + 1) for part in parts]
        squares = [_square(output - leaving, real) for output, (_, leaving, real) in zip(outputs, parts, strict=True)]
        errors.append(torch.stack(squares).sum() / size)
    return {"loss": torch.stack(errors).mean()}


def gather_states(distillation: Distillation, batches: Iterable[Batch], most: int, accelerator: Accelerator) -> list[States]:
    """The states of at least one batch, and of as many as fit into `most` bytes, counted over all processes. Each process holds
    those of its share of a batch; the squared norms are means over the processes."""
    gathered: list[States] = []
    held = 0.0
    for (ids, targets, *_), text, _ in batches:
        real = (targets != IGNORE).flip(1).cumsum(1).flip(1) > 0  # up to the last target
        parts: dict[int, list[Part]] = {}
        for tokens, mask, places in [(ids, real, None)] + ([] if text is None else [text[:3]]):
            for i, below, leaving in distillation.block_states(tokens, places):
                rows = mask if below.documents is None else below.documents.groups[0].unpack(mask)
                parts.setdefault(i, []).append((below, leaving, rows))
        squares = {i: [_square(leaving - _entering(below), real) for below, leaving, real in parts[i]] for i in parts}
        size = sum(below.nbytes + leaving.nbytes + real.nbytes for both in parts.values() for below, leaving, real in both)
        held += accelerator.reduce(torch.tensor(float(size), device=ids.device), "sum").item()
        norms = accelerator.reduce({i: torch.stack(values).sum() for i, values in squares.items()}, "mean")
        if gathered and held > most:
            break
        gathered.append({i: (parts[i], norms[i]) for i in parts})
    return gathered


@contextmanager
def without_gates(model: Hybrid) -> Iterator[None]:
    """Make the grafts of a hybrid attention alone for a while. Meanwhile their gates are not among its parameters."""
    mixers = [model.mixer_at(layer) for layer in range(model.config.num_hidden_layers)]
    gated = [mixer for mixer in mixers if getattr(getattr(mixer, "graft", None), "gate", None) is not None]
    if any(getattr(mixer.graft, "own_values", False) for mixer in gated):
        raise UserError("tune.align: heads that copy are added to the base, and take nothing's place; leave it out")
    removed = [(mixer.graft.gate, mixer.ssm_heads) for mixer in gated]
    try:
        for mixer in gated:
            mixer.ssm_heads = [head for head in mixer.ssm_heads if head not in mixer.graft.heads]
            mixer.graft.gate = None
        yield
    finally:
        for mixer, (gate, heads) in zip(gated, removed, strict=True):
            mixer.graft.gate, mixer.ssm_heads = gate, heads


def _entering(below: Below) -> Tensor:
    assert below.states is not None
    return below.states


def _square(difference: Tensor, real: Tensor) -> Tensor:
    return difference[real].float().square().sum()
