"""Where the null key stands: b of each grafted head, such that an untrained graft is open on a given share of plain text.

m_t = sigmoid(lse_t - b), with lse_t the log-sum-exp of a token's scores (docs/derivations.md). Located heads score tens of nats
where a key matches and far less on text, so b on text leaves most answers alone (docs/claims.md).
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from surgery.modeling.graft import NATS, ChannelGraft, Graft, watched
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.runtime.progress import bar
from surgery.splicing.splice import splice

FIRST = 8  # tokens at the beginning of a row that have hardly anything to look up
BEGIN, SEEN = 30.0, 12.0  # nats: the first guess at b, and how far above it a log-sum-exp is known exactly
PASSES = 6  # over the text, at most; one nearly always does


def calibrate(model: Any, plan: Plan, rows: Tensor, share: float, batch_size: int = 8) -> Plan:
    """The plan with null keys: over the tokens of `rows` (texts, tokens), as the base reads them, the mean of m is `share`.

    Channels that share a query-key pair share b, and the mean is over them. It costs a forward of the base, as a rule.
    """
    heads = {name: plan.starts.get(name, Start()) for site in plan.sites for name in site.head_names}
    guess = dict.fromkeys(heads, BEGIN)
    for _ in range(PASSES):
        starts = {name: start.model_copy(update={"null": guess[name]}) for name, start in heads.items()}
        # The gate is 0: every layer reads what it reads in the base.
        hybrid = splice(model, plan.model_copy(update={"starts": starts, "gate": 0.0, "closed_below": 0.0})).eval()
        found = {name: solve_null(lse, share) for name, lse in read_scores(hybrid, rows, batch_size).items()}
        unsure = {name for name in heads if found[name] > guess[name] + SEEN}
        guess = found
        if not unsure:
            break
    starts = {name: start.model_copy(update={"null": round(guess[name], 3)}) for name, start in heads.items()}
    return plan.model_copy(update={"starts": starts})


@torch.no_grad()
def read_scores(hybrid: Any, rows: Tensor, batch_size: int) -> dict[str, Tensor]:
    """Head -> the log-sum-exp of its scores at every token of text, in nats; for channels of a pair those of all of them."""
    parts: dict[tuple[Graft, int], list[Tensor]] = defaultdict(list)
    heads: dict[str, tuple[Graft, int]] = {}
    for entry in hybrid.config.grafts:
        graft = hybrid.mixer_at(entry["layer"]).graft
        for pair, places in enumerate(served(graft)):
            names = Site(entry["layer"], tuple(graft.heads[place] for place in places)).head_names
            heads |= dict.fromkeys(names, (graft, pair))

    def watch(graft: Graft, m: Tensor) -> None:
        assert graft.null is not None
        for pair, places in enumerate(served(graft)):
            share = m[:, FIRST:, places].double()
            lse = (share / (1 - share).clamp_min(1e-12)).log() + NATS * graft.null[pair].double()
            parts[graft, pair].append(lse.flatten().cpu())

    device = next(hybrid.parameters()).device
    with watched([graft for graft, _ in heads.values()], watch):
        for some in bar(list(rows.split(batch_size)), "null keys"):
            hybrid(input_ids=some.to(device), use_cache=False, logits_to_keep=1)
    return {name: torch.cat(parts[place]) for name, place in heads.items()}


def served(graft: Graft) -> list[list[int]]:
    """For every query-key pair of a graft, the places in `heads` that it serves."""
    return graft.pairs if isinstance(graft, ChannelGraft) else [[place] for place in range(len(graft.heads))]


def solve_null(lse: Tensor, share: float) -> float:
    """b with mean sigmoid(lse - b) = share, by bisection to a thousandth of a nat."""
    finite = lse[lse.isfinite()]
    if not len(finite):
        return BEGIN
    low, high = float(finite.min()) - 50, float(finite.max()) + 50
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if float(torch.sigmoid(lse - middle).mean()) > share else (low, middle)
    return (low + high) / 2
