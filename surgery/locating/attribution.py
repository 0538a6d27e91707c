"""Splice attribution ranks all heads for splicing from one forward and one backward.

Put a blend gate g_h between every head's SSM output and its dual graft's, y_h = (1 - g_h) ssm_h + g_h attn_h, all gates 0, so
that the model is the base. The gradient of the probe's loss by g_h is the rate at which the loss changes when the head begins
to turn into attention: a slope at gate 0, in nats per unit of gate. Its order is close to that of the exact gains, above all
among the leading heads; its size is not: at tiny-mamba2's first head the slope is 12.5, and splicing saves 1.4 nats. A gate
has one value per head *and example*, so that the same backward gives every example's own gradient, and thereby an interval.

The gates themselves need not be computed. The gradient by a gate is the gradient by the SSM's output y_h times what would
change there, attn_h - ssm_h.

The dual start leaves a sign and a scale open (plan.Start). Attribution also chooses them: for every head the start whose
attribution is largest.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from surgery.hybrids.patching import replaced
from surgery.locating.attribution_memory import WHOLE, Step, intercept_ssm_output, parted
from surgery.locating.recording import handing_on
from surgery.locating.subject import Subject
from surgery.models.finite import checked, explained
from surgery.models.offloaded import own_fetched
from surgery.probes.encoded import Encoded, padded
from surgery.records.plan import Start

GRADIENTS = "the gradients by the heads' gates"
# The largest scale leads where the softmax is as good as an argmax: attribution rises up to about tau = 2 and is flat from
# there (tiny-mamba2's L0.H5: 4.4, 10.9, 13.9, 14.3 up to 2, and 14.3 at 4 and 16; the exact gain is 1.625 at each from 1 on).
# There the edge of the grid is the foot of a plateau, and sharper starts retrieve no more (both heads spliced, 64 pairs: .704,
# .721, .720, .713 at tau 1, 2, 4, 16).
STARTS = tuple(Start(sign=sign, tau=tau) for sign in (1, -1) for tau in (0.25, 0.5, 1.0, 2.0))


def attribute_starts(gated: Subject, encoded: Encoded, starts: Sequence[Start | None] = STARTS, step: Step = WHOLE) -> Tensor:
    """(starts, questions, layers, heads): for each of the starts, given to all heads, minus the gradient of each question's
    loss by each head's gate, in nats; NaN for heads of attention. The start None leaves every head the one that it has.

    gated: walk.fully_gated. The gradient by the SSM's output is the same for all starts. So the attention is computed on the
    way back only, with each start in turn, and one forward and one backward serve them all. step: what is done at a time, and
    whether every block is computed a second time on the way back, which changes no bit and keeps one block's activations
    instead of all (attribution_memory.py).
    """
    parts = [_attribute(gated, part, starts, step.checkpointed) for part in parted(encoded, step.rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _attribute(gated: Subject, encoded: Encoded, starts: Sequence[Start | None], checkpointed: bool) -> Tensor:
    """The same in one forward and one backward."""
    ssms = gated.anatomy.ssms
    mixers = [mixer.module for mixer in ssms]
    per_row: list[Tensor] = [torch.empty(0)] * len(mixers)
    handles: list[Any] = []

    def listen(number: int, mixer: Any, y: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        graft = mixer.graft
        y = y if y.requires_grad else y.detach().requires_grad_()  # at the first layer nothing does

        def read(gradient: Tensor) -> None:
            with torch.no_grad(), own_fetched(mixer):
                values, own = [], (graft.signs, graft.log_tau.clone())
                try:
                    for start in starts:
                        if start is not None:
                            graft.signs = [start.sign] * len(graft.signs)
                            graft.log_tau.fill_(math.log(start.tau))
                        change = type(mixer).attend(mixer, *args, **kwargs).view_as(y) - y
                        values.append(-(gradient.float() * change.float()).sum((1, 3)))
                finally:
                    graft.signs = own[0]
                    graft.log_tau.copy_(own[1])
                per_row[number] = torch.stack(values)
            # A hook on y that holds y is a cycle through C++, which the garbage collector does not see. What is read once is
            # let go at once: until the end, these would be the activations of all layers.
            handle.remove()

        handle = y.register_hook(read)
        handles.append(handle)
        return y

    try:
        with frozen(gated.model), intercept_ssm_output(mixers, listen), torch.enable_grad():
            blocks = {block: _checkpointed(block.forward) for block in gated.anatomy.blocks} if checkpointed else {}
            answer_losses(gated, encoded, blocks).sum().backward()
    finally:
        for handle in handles:
            handle.remove()  # where something failed
    rows = torch.stack([values.to(per_row[0].device) for values in per_row], 2)  # starts, rows, SSMs, heads
    # A question may own several rows (candidates of several tokens); its gradient is their sum.
    totals = rows.new_zeros(len(rows), len(encoded), *rows.shape[2:])
    totals = checked(totals.index_add(1, encoded.owners().to(rows.device), rows).cpu(), GRADIENTS)
    layers = range(len(gated.anatomy.blocks))
    most = max(gated.anatomy.heads(layer) for layer in layers)
    if (len(layers), most) == totals.shape[2:]:
        return totals
    everywhere = totals.new_full((*totals.shape[:2], len(layers), most), math.nan)
    everywhere[:, :, [mixer.layer for mixer in ssms], : totals.shape[3]] = totals
    return everywhere


def answer_losses(subject: Subject, encoded: Encoded, blocks: Mapping[nn.Module, Callable[..., Any]] | None = None) -> Tensor:
    """(questions,): the loss of each, with gradients. blocks: forwards in place of those of some blocks."""
    ids, _ = padded(encoded.rows, subject.model.device)
    blocks, final = dict(blocks or {}), subject.anatomy.blocks[-1]
    blocks[final] = handing_on(blocks.get(final, final.forward), encoded.target_positions())
    with replaced(blocks):
        logits = subject.model(input_ids=ids, use_cache=False).logits[:, -1]
    with explained(subject.model, encoded.rows):
        return encoded.losses(logits)


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block's forward that keeps nothing but what enters it, and is computed again on the way back."""

    def again(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Without a gradient in sight nothing would be computed on the way back; what enters the first block has none.
        in_sight = torch.zeros((), requires_grad=True)
        return checkpoint(
            lambda hidden, _: forward(hidden, *args, **kwargs), hidden, in_sight, use_reentrant=True, preserve_rng_state=False
        )

    return again


def best_starts(totals: Tensor, channels: bool = False) -> dict[str, Start]:
    """From attributions (starts, layers, heads), every head's best start. channels: heads are channels, and those with the same
    start share a query-key pair; so each layer has one start for all of them, under which they have most to gain. Heads that
    are no SSM's (NaN) have none."""
    best = totals.argmax(0)
    if channels:
        best = totals.nan_to_num().clamp_min(0).sum(-1).argmax(0)[:, None].expand_as(best)
    numbers, lacking = best.tolist(), totals[0].isnan().tolist()
    return {
        f"L{layer}.H{head}": STARTS[start]
        for layer, row in enumerate(numbers) for head, start in enumerate(row) if not lacking[layer][head]
    }  # fmt: skip


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No gradient of a weight is computed or stored."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)
