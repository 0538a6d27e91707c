"""Null keys of all heads: where each would stand if the head became attention, so that attribution measures the gated graft.

m_t = sigmoid(lse_t - b), with lse_t the log-sum-exp of a token's scores (docs/derivations.md). b is solved, for each head and
start, such that the mean of m over plain text is a given share. A plan's own heads are then solved by their real grafts
(planning/calibrate.py).
"""

from typing import Any

import torch
from torch import Tensor

from surgery.locating.attribution import STARTS, attention_logits, graft_mixers, tapped
from surgery.modeling.graft import ChannelGraft, Streams
from surgery.modeling.reference import at_least_float32
from surgery.runtime.progress import bar

FIRST = 8  # tokens at the beginning of a text that have hardly anything to look up


@torch.no_grad()
def null_logits(model: Any, rows: Tensor, share: float, batch_size: int = 8) -> dict[int, Tensor]:
    """By layer, (starts, heads): the logit b of each head's null key with which its untrained graft is open, in the mean, on
    this share of plain text. rows (texts, tokens): ids. model: adopted. It costs a forward of the base."""
    mixers, totals = graft_mixers(model), dict[int, list[Tensor]]()

    def tap(mixer: Any, streams: Streams, y: Tensor, _: Any) -> Tensor:
        at = torch.arange(min(FIRST, y.shape[1] - 1), y.shape[1], device=y.device)
        channels = issubclass(mixer.graft_class, ChannelGraft)
        found = torch.zeros(len(STARTS), y.shape[2], len(y), len(at), device=y.device)
        written = torch.zeros_like(y[..., :1, 0])
        if channels and streams.write is not None:  # the scores of channels lack their time steps: the mean channel's
            written = at_least_float32(streams.write).mean(-1, keepdim=True).log()
        for i, some, heads, logits in attention_logits(mixer, streams, at):
            total = (logits + written[some, None, None, :, 0]).logsumexp(-1)
            found[i, slice(None) if channels else heads, some] = total.transpose(0, 1).float()
        totals.setdefault(mixer.layer_idx, []).append(found.flatten(2).cpu())  # once: reading waits for a GPU
        return y

    with tapped(mixers, tap):
        for some in bar(list(rows.split(batch_size)) if mixers else [], "null keys"):
            model(input_ids=some.to(next(model.parameters()).device), use_cache=False, logits_to_keep=1)
    nulls = {}
    for layer, parts in totals.items():
        nulls[layer] = solve_null(torch.cat(parts, -1), share)
    return nulls


def solve_null(lse: Tensor, share: float) -> Tensor:
    """b (...) with mean sigmoid(lse - b) = share over the last dimension of the log-sum-exps lse (..., n), in nats."""
    low, high = lse.amin(-1) - 50, lse.amax(-1) + 50
    for _ in range(24):  # to a hundred-thousandth of a nat where scores are usual
        middle = (low + high) / 2
        over = (lse - middle[..., None]).sigmoid().mean(-1) > share
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return (low + high) / 2
