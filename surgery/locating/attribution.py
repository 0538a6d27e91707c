"""Splice attribution ranks all heads for splicing from one forward and one backward.

Put a blend gate g_h between every head's SSM output and its dual graft's, y_h = (1 - g_h) ssm_h + g_h attn_h, all gates 0, so
that the model is the base. The gradient of the probe's loss by g_h is the rate at which the loss changes when the head begins
to turn into attention: a slope at gate 0, in nats per unit of gate. Its order is that of the exact gains (rank correlation .996
over tiny-mamba2's heads); its size is not: at the head where it is 12.7, splicing saves 1.4 nats, which is all there is. The
gates here have one value per head *and example*, so that the same backward gives every example's own gradient, from which the
interval over examples follows.

The dual start leaves a sign and a scale open (plan.Start). Attribution also chooses them: for every head the start whose
attribution is largest. Where only starts differ, the gates need not be there at all (attribute_starts).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from surgery.locating.exact import question_of_row
from surgery.locating.walk import fully_gated
from surgery.models.anatomy import anatomy
from surgery.models.finite import checked, explained
from surgery.probes.scoring import Encoded, padded
from surgery.records.plan import Start
from surgery.records.site import Site

GRADIENTS = "the gradients by the heads' gates"
# The largest scale leads where the softmax is as good as an argmax: attribution rises up to about tau = 2 and is flat from
# there (tiny-mamba2's L0.H5: 4.4, 10.9, 13.9, 14.3 up to 2, and 14.3 at 4 and 16; the exact gain is 1.625 at each from 1 on).
# There the edge of the grid is the foot of a plateau, and sharper starts retrieve no more (both heads spliced, 64 pairs: .704,
# .721, .720, .713 at tau 1, 2, 4, 16).
STARTS = tuple(Start(sign=sign, tau=tau) for sign in (1, -1) for tau in (0.25, 0.5, 1.0, 2.0))


def attribute(gated: PreTrainedModel, encoded: Encoded) -> Tensor:
    """(questions, layers, heads): minus the gradient of each question's loss by each gate, in nats.

    `gated` is a fully gated base (walk.fully_gated).
    """
    ids, last = padded(encoded.rows, gated.device)
    names = [name for name, _ in gated.named_parameters() if name.endswith(".graft.gate")]
    heads = {name: len(gated.get_parameter(name)) for name in names}
    gates = {name: torch.zeros(len(ids), heads[name], device=ids.device, requires_grad=True) for name in names}
    with _frozen(gated), torch.enable_grad():
        keep, where = last.unique(return_inverse=True)
        logits = functional_call(gated, gates, (), {"input_ids": ids, "use_cache": False, "logits_to_keep": keep}).logits
        logits = logits[torch.arange(len(ids), device=ids.device), where]
        with explained(gated, encoded.rows):
            losses = encoded.losses(logits)
        gradients = torch.autograd.grad(losses.sum(), [gates[name] for name in names])
    per_row = -torch.stack(gradients, 1)  # rows, layers, heads
    # A question may own several rows (candidates of several tokens); its gradient is their sum.
    out = per_row.new_zeros(len(encoded.choices), *per_row.shape[1:])
    return checked(out.index_add(0, question_of_row(encoded).to(per_row.device), per_row).cpu(), GRADIENTS)


def attribute_starts(ungated: PreTrainedModel, encoded: Encoded, starts: Sequence[Start | None] = STARTS) -> Tensor:
    """(starts, questions, layers, heads): what `attribute` says for a model gated with each of the starts everywhere.

    `ungated` is a fully gated base whose heads all have the same start; for the start None, each may have its own.
    The gradient of the loss by a gate is the gradient by the SSM's output times what would change there; the former is the same
    for all starts. So the attention is computed on the way back only, with each start in turn, and one forward and one backward
    serve them all.
    """
    ids, last = padded(encoded.rows, ungated.device)
    mixers = [mixer.module for mixer in anatomy(ungated).mixers]
    per_row: list[Tensor] = [torch.empty(0)] * len(mixers)

    def listen(layer: int, mixer: Any) -> dict[tuple[Any, str], Any]:
        """Other methods for a mixer and its graft: the attention is put off, the SSM's output goes through, listened to."""
        attend, graft, asked = mixer.attend, mixer.graft, []

        def put_off(*args: Any, **kwargs: Any) -> Tensor:
            asked.append((args, kwargs))
            return ids.new_zeros(())  # nobody looks at it

        def blend(y: Tensor, _: Tensor) -> Tensor:
            args, kwargs = asked.pop()
            y = y if y.requires_grad else y.detach().requires_grad_()  # at the first layer nothing does

            def read(gradient: Tensor) -> None:
                with torch.no_grad():
                    found, own = [], (graft.signs, graft.log_tau.clone())
                    for start in starts:
                        if start is not None:
                            graft.signs = [start.sign] * len(graft.signs)
                            graft.log_tau.fill_(math.log(start.tau))
                        change = attend(*args, **kwargs).view_as(y) - y
                        found.append(-(gradient.float() * change.float()).sum((1, 3)))
                    per_row[layer] = torch.stack(found)
                    graft.signs = own[0]
                    graft.log_tau.copy_(own[1])

            y.register_hook(read)
            return y

        return {(mixer, "attend"): put_off, (graft, "blend"): blend}

    methods = {key: value for layer, mixer in enumerate(mixers) for key, value in listen(layer, mixer).items()}
    with _frozen(ungated), _methods(methods), torch.enable_grad():
        keep, where = last.unique(return_inverse=True)
        logits = ungated(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
        logits = logits[torch.arange(len(ids), device=ids.device), where]
        with explained(ungated, encoded.rows):
            losses = encoded.losses(logits)
        losses.sum().backward()
    rows = torch.stack([found.to(per_row[0].device) for found in per_row], 2)  # starts, rows, layers, heads
    out = rows.new_zeros(len(rows), len(encoded.choices), *rows.shape[2:])
    return checked(out.index_add(1, question_of_row(encoded).to(rows.device), rows).cpu(), GRADIENTS)


def choose_starts(base: PreTrainedModel, layers: int, heads: int, batches: Sequence[Encoded]) -> dict[str, Start]:
    """For every head ("L1.H3") the start with the largest mean attribution over the questions of `batches`."""
    ungated = fully_gated(base, layers, heads)
    return best_starts(torch.stack([attribute_starts(ungated, encoded).sum(1) for encoded in batches]).sum(0))


def best_starts(totals: Tensor, channels: bool = False) -> dict[str, Start]:
    """From attributions (starts, layers, heads), every head's best. channels: heads are channels, and each layer has one start
    for all of them, the one under which they have most to gain: those with the same start share a query-key pair."""
    best = totals.argmax(0)
    if channels:
        best = totals.clamp_min(0).sum(-1).argmax(0)[:, None].expand_as(best)
    return {str(Site(layer, (head,))): STARTS[int(best[layer, head])] for layer, head in np.ndindex(*best.shape)}


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """No gradient of a weight is computed or stored."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)


@contextmanager
def _methods(others: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Objects with other methods."""
    try:
        for (owner, name), method in others.items():
            setattr(owner, name, method)
        yield
    finally:
        for owner, name in others:
            owner.__dict__.pop(name, None)
