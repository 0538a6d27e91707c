"""Hints: where the grafts look while they are tuned.

The loss on an answer tells a head to look a little more at what helped. Among hundreds of tokens that is nearly nothing as long
as the head looks everywhere alike: where an untrained graft does not choose among the summaries already, training hardly
begins. The lessons know what each answer is read from, and a graft's attention is there to be seen; so a hint says it, as
those of pretraining do for a Transformer (pretraining/hints.py). Within the summary a head may choose; what it reads there is
left to the loss on the answer. A control without grafts has nothing to hint at.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.hybrids.common import Graft
from surgery.hybrids.layer_graft import LayerGraft

Seen = Mapping[Any, tuple[Tensor, Tensor]]  # graft -> queries and keys, (b, heads, t, width) each: q . k is the score


@contextmanager
def watching(model: nn.Module | None) -> Iterator[Seen]:
    """While this lasts, the queries and keys of the model's grafts are kept: of each graft those of its last run. Of no model
    nothing."""
    seen: dict[Any, tuple[Tensor, Tensor]] = {}
    grafts = [module for module in model.modules() if isinstance(module, Graft | LayerGraft)] if model is not None else []

    def watched(graft: Any) -> Any:
        own = graft.attend

        def attend(q: Tensor, k: Tensor, *others: Any) -> Tensor:
            seen[graft] = q, graft.per_head(k) if isinstance(graft, LayerGraft) else k
            return own(q, k, *others)

        return attend

    try:
        for graft in grafts:
            vars(graft)["attend"] = watched(graft)
        yield seen
    finally:
        for graft in grafts:
            vars(graft).pop("attend", None)


def missed(seen: Seen, evidence: Tensor) -> Tensor:
    """Minus the logarithm of the attention that summaries get, in nats: the mean over heads, summed over the targets whose
    evidence is known. evidence: as sequences.collate_with_evidence gives it."""
    return torch.cat([_missed(q, k, evidence) for q, k in seen.values()]).mean()


def _missed(q: Tensor, k: Tensor, evidence: Tensor) -> Tensor:
    """(heads,): the same for each head."""
    known = evidence[..., 1] > evidence[..., 0]  # b t
    most = int(known.sum(1).max())
    at = known.int().argsort(dim=1, descending=True, stable=True)[:, :most]  # of each row the targets, and others after them
    real = known.gather(1, at)
    first, behind = (side.gather(1, at)[..., None] for side in evidence.unbind(-1))
    places = torch.arange(k.shape[2], device=k.device)
    past = places <= at[..., None]  # b most t
    inside = past & (((places >= first) & (places < behind)) | ~real[..., None])  # of others nothing is missed
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        asking = q.gather(2, at[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])).to(dtype)
        scores = asking @ k.to(dtype).transpose(-1, -2)  # b heads most t
        whole = scores.masked_fill(~past[:, None], -torch.inf).logsumexp(-1)
        found = scores.masked_fill(~inside[:, None], -torch.inf).logsumexp(-1)
        return (whole - found).sum((0, 2))
