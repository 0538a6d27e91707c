"""Hints: where the grafts look while they are tuned.

The loss on an answer tells a head to look a little more at what helped. Among hundreds of tokens this gradient is near zero
where its attention is uniform: a graft that does not choose among the summaries untrained hardly learns to. The lessons know
what each answer is read from, the recall hits of text where their pair occurred before, and a graft's attention is there to be
seen; so a hint says it, as those of pretraining do for a Transformer (pretraining/hints.py). Where a plan knows the place at
which a head reads an answer (Plan.places), the hint is that token. Otherwise the head may choose within the summary, and what
it reads there is left to the loss on the answer. A control without grafts has nothing to hint at.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.hybrids.layer_graft import LayerGraft
from surgery.hybrids.mixer import Graft
from surgery.hybrids.patching import replaced
from surgery.probes.hits import NONE


@dataclass(frozen=True)
class GraftScores:
    """Queries and keys of a graft, (b, heads, t, width) each: q . k is the score. places: of each head, as in a plan; None
    where it is not known."""

    q: Tensor
    k: Tensor
    places: tuple[int | None, ...]


Seen = Mapping[Any, GraftScores]  # by graft


def has_grafts(model: nn.Module) -> bool:
    """Whether there is anything to hint at."""
    return any(isinstance(module, Graft | LayerGraft) for module in model.modules())


@contextmanager
def watching(model: nn.Module | None, places: Mapping[str, int] | None = None) -> Iterator[Seen]:
    """While this lasts, the queries and keys of the model's grafts are kept: of each graft those of its last run. Of no model
    nothing. places: where heads read (Plan.places)."""
    seen: dict[Any, GraftScores] = {}
    known = places or {}
    grafts: dict[Any, list[int | None]] = {}  # with the place of each of its heads
    for module in model.modules() if model is not None else ():
        if isinstance(module, LayerGraft):
            grafts[module] = []
        elif isinstance(graft := getattr(module, "graft", None), Graft):
            grafts[graft] = [known.get(f"L{module.layer_idx}.H{head}") for head in graft.heads]

    def watched(graft: Any, each: list[int | None]) -> Any:
        own = graft.attend

        def attend(q: Tensor, k: Tensor, *others: Any) -> Tensor:
            # Heads that share scores can look at one place only.
            shared = each[0] if len(set(each)) == 1 else None
            own_places = each if len(each) == q.shape[1] else [shared] * q.shape[1]
            seen[graft] = GraftScores(q, graft.per_head(k) if isinstance(graft, LayerGraft) else k, tuple(own_places))
            return own(q, k, *others)

        return attend

    with replaced({(graft, "attend"): watched(graft, each) for graft, each in grafts.items()}):
        yield seen


def evidence_of_hits(before: Tensor) -> Tensor:
    """What the recall hits of text are read from, (b, t, 2), as sequences.collate_with_evidence gives it for answers of the
    probe recall: the token that stood there before, and the one behind it. before (b, t): as packed_rows.pad_packed_with_hits
    gives it."""
    asked = before.roll(-1, 1)  # from the token before the hit
    asked[:, -1] = NONE
    return torch.stack((asked, asked + 2), -1).masked_fill_((asked == NONE)[..., None], 0)


def attention_nll(seen: Seen, evidence: Tensor, begins: Tensor | None = None) -> Tensor:
    """Minus the logarithm of the attention that summaries get, or the known place in each, in nats: the mean over heads, summed
    over the targets whose evidence is known. evidence: as sequences.collate_with_evidence gives it. begins (b, t): where the
    document of each token begins, where a row holds several; evidence is counted from there."""
    return torch.cat([_missed(scores, evidence, begins) for scores in seen.values()]).mean()


def _missed(of: GraftScores, evidence: Tensor, begins: Tensor | None) -> Tensor:
    """(heads,): the same for each head."""
    q, k = of.q, of.k
    known = evidence[..., 1] > evidence[..., 0]  # b t
    most = int(known.sum(1).max())
    at = known.int().argsort(dim=1, descending=True, stable=True)[:, :most]  # of each row the targets, and others after them
    real = known.gather(1, at)
    positions = torch.arange(k.shape[2], device=k.device)
    begin = torch.zeros_like(at) if begins is None else begins.gather(1, at)
    past = ((positions <= at[..., None]) & (positions >= begin[..., None]))[:, None]  # b 1 most t
    first, stop = ((begin + side.gather(1, at))[:, None, :, None] for side in evidence.unbind(-1))
    looked = [
        (positions >= first) & (positions < stop) if place is None
        # A summary ends with the token behind the span.
        else positions == (stop - 1 - place).clamp_min(begin[:, None, :, None]).minimum(at[:, None, :, None])
        for place in of.places
    ]  # fmt: skip
    inside = past & (torch.cat(looked, 1) | ~real[:, None, :, None])  # of others nothing is missed
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        asking = q.gather(2, at[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])).to(dtype)
        scores = asking @ k.to(dtype).transpose(-1, -2)  # b heads most t
        whole = scores.masked_fill(~past, -torch.inf).logsumexp(-1)
        score = scores.masked_fill(~inside, -torch.inf).logsumexp(-1)
        return (whole - score).sum((0, 2))
