"""Splice attribution: the first-order splice gain of every head from one forward and one backward.

Put a blend gate g_h between every head's SSM output and its dual graft's, y_h = (1 - g_h) ssm_h + g_h attn_h, all gates 0, so
that the model is the base. The gradient of the probe's loss by g_h is the rate at which the loss changes when the head turns
into attention. The gates here have one value per head *and example*, so that the same backward gives every example's own
gradient, from which the interval over examples follows.

The dual start leaves a sign and a scale open (plan.Start). Attribution also chooses them: for every head the start whose
attribution is largest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from surgery.locate.walk import fully_gated
from surgery.plan import Start
from surgery.probes.scoring import Encoded, padded
from surgery.site import Site

STARTS = tuple(Start(sign=sign, tau=tau) for sign in (1, -1) for tau in (0.25, 0.5, 1.0, 2.0))


def attribute(gated: PreTrainedModel, encoded: Encoded) -> Tensor:
    """(questions, layers, heads): minus the gradient of each question's loss by each gate, in nats.

    `gated` is a fully gated base (walk.fully_gated).
    """
    ids, last = padded(encoded.rows, gated.device)
    names = [name for name, _ in gated.named_parameters() if name.endswith(".graft.gate")]
    heads = gated.config.num_heads
    gates = {name: torch.zeros(len(ids), heads, device=ids.device, requires_grad=True) for name in names}
    frozen = [p for p in gated.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)  # only the gates: no gradient of a weight is computed or stored
    try:
        with torch.enable_grad():
            keep, where = last.unique(return_inverse=True)
            logits = functional_call(gated, gates, (), {"input_ids": ids, "use_cache": False, "logits_to_keep": keep}).logits
            logits = logits[torch.arange(len(ids), device=ids.device), where]
            losses = encoded.losses(logits)
            gradients = torch.autograd.grad(losses.sum(), [gates[name] for name in names])
    finally:
        for p in frozen:
            p.requires_grad_(True)
    per_row = -torch.stack(gradients, 1)  # rows, layers, heads
    # A question may own several rows (candidates of several tokens); its gradient is their sum.
    question_of_row = torch.empty(len(ids), dtype=torch.long)
    question_of_row[encoded.terms[:, 2]] = encoded.terms[:, 0]
    out = per_row.new_zeros(len(encoded.choices), *per_row.shape[1:])
    return out.index_add(0, question_of_row.to(per_row.device), per_row).cpu()


def choose_starts(base: PreTrainedModel, layers: int, heads: int, batches: Sequence[Encoded]) -> dict[str, Start]:
    """For every head ("L1.H3") the start with the largest mean attribution over the questions of `batches`."""
    totals = []
    for start in STARTS:
        everywhere = {str(Site(layer, (head,))): start for layer in range(layers) for head in range(heads)}
        gated = fully_gated(base, layers, heads, everywhere)
        totals.append(sum(attribute(gated, encoded).sum(0) for encoded in batches))
    best = torch.stack([torch.as_tensor(total) for total in totals]).argmax(0)
    return {str(Site(layer, (head,))): STARTS[int(best[layer, head])] for layer in range(layers) for head in range(heads)}
