"""Where the null key stands: b of each grafted head, such that an untrained graft is open on a given share of plain text.

m_t = sigmoid(lse_t - b), with lse_t the log-sum-exp of a token's scores (docs/derivations.md). Located heads score tens of nats
where a key matches and far less on text, so b on text leaves most answers alone (docs/claims.md).

The score says that something matches, not whose match it is: a question about another skill may score as high as an answer. The
query does tell them apart, so a null key may read it (`fit_queries`).
"""

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.errors import UserError
from surgery.locating.nulls import FIRST
from surgery.modeling.graft import NATS, SMALLEST, ChannelGraft, Graft, watched
from surgery.modeling.reference import at_least_float32
from surgery.probes.encoded import Encoded
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.runtime.progress import bar
from surgery.splicing.splice import splice

BEGIN, SEEN = 30.0, 12.0  # nats: the first guess at b, and how far above it a log-sum-exp is known exactly
FURTHER = 50.0  # nats: so far above what was seen is the next guess; m can be told from 0 down to 87 below it
PASSES = 40  # over the text, at most; one nearly always does
RIDGE = 1e-5  # the weight of the squares of w, for queries of unit variance


def calibrate(model: Any, plan: Plan, rows: Tensor, share: float, batch_size: int = 8) -> Plan:
    """The plan with null keys: over the tokens of `rows` (texts, tokens), as the base reads them, the mean of m is `share`.

    Channels that share a query-key pair share b, and the mean is over them. It costs a forward of the base, as a rule. Raises
    UserError where scores are so large that no b is found.
    """
    heads = {name: plan.starts.get(name, Start()) for site in plan.sites for name in site.head_names}
    guess = dict.fromkeys(heads, BEGIN)
    for _ in range(PASSES):
        starts = {name: start.model_copy(update={"null": guess[name]}) for name, start in heads.items()}
        # The gate is 0: every layer reads what it reads in the base.
        hybrid = splice(model, plan.model_copy(update={"starts": starts, "gate": 0.0, "closed_below": 0.0})).eval()
        found = {name: solve_null(lse, share) for name, lse in read_scores(hybrid, rows, batch_size).items()}
        unsure = [name for name in heads if not found[name] <= guess[name] + SEEN]
        guess = {name: b + FURTHER * (name in unsure) for name, b in found.items()}
        if not unsure:
            break
    else:
        raise UserError(
            f"{unsure[0]}: scores on text are beyond {guess[unsure[0]]:.0f} nats; choose other heads, or plan.share=null"
        )
    starts = {name: start.model_copy(update={"null": round(guess[name], 3)}) for name, start in heads.items()}
    return plan.model_copy(update={"starts": starts})


@torch.no_grad()
def read_scores(hybrid: Any, rows: Tensor, batch_size: int) -> dict[str, Tensor]:
    """Head -> the log-sum-exp of its scores at every token of text, in nats; for channels of a pair those of all of them."""
    parts: dict[tuple[Graft, int], list[Tensor]] = defaultdict(list)
    heads: dict[str, tuple[Graft, int]] = {}
    for mixer in hybrid.own_mixers():
        graft = mixer.graft
        for pair, places in enumerate(served(graft)):
            names = Site(mixer.layer_idx, tuple(graft.heads[place] for place in places)).head_names
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
    finite = lse[lse.isfinite()]  # the others lie so far below the guess that m was 0
    if not len(finite):
        return BEGIN
    low, high = float(finite.min()) - 50, float(finite.max()) + 50
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if float(torch.sigmoid(lse - middle).mean()) > share else (low, middle)
    return (low + high) / 2


def fit_queries(model: Any, plan: Plan, wanted: Encoded, kept: Encoded, rows: Tensor, batch_size: int = 8) -> Plan:
    """The plan with null keys that read the query: m_t = sigmoid(lse_t - b - w . q_t) is a logistic regression, in which a
    graft is open (1) at the answers of `wanted`, and closed (0) on the questions `kept` and on text, `rows` (texts, tokens).
    The three count alike."""
    hybrid = splice(model, plan.model_copy(update={"gate": 0.0})).eval()  # every layer reads what it reads in the base
    everywhere = torch.ones(rows.shape, dtype=torch.bool)
    texts = [(wanted.padded(), wanted.mask("query")), (kept.padded(), kept.mask("everywhere")), (rows, everywhere)]
    read = [read_matches(hybrid, ids, chosen, batch_size) for ids, chosen in texts]
    starts = {}
    for name in read[0]:
        kinds = [each[name] for each in read]
        weights = torch.cat([torch.full((len(lse),), 1 / len(lse)) for lse, _ in kinds]).double()
        target = torch.cat([torch.full((len(lse),), float(i == 0)) for i, (lse, _) in enumerate(kinds)]).double()
        lse, q = (torch.cat(each) for each in zip(*kinds, strict=True))
        w, b = fit_logistic(lse, q, target, weights)
        found = {"null": round(b, 3), "null_query": tuple(round(each, 4) for each in w.tolist())}
        starts[name] = plan.starts.get(name, Start()).model_copy(update=found)
    return plan.model_copy(update={"starts": starts})


@torch.no_grad()
def read_matches(hybrid: Any, ids: Tensor, chosen: Tensor, batch_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Head -> at the chosen tokens, (rows, t) bool, the log-sum-exp of its scores (n,) and its query (n, width); tokens at the
    beginning of a row are left out. Of channels that share a pair, with their mean time step."""
    chosen = chosen.clone()
    chosen[:, : min(FIRST, chosen.shape[1] - 1)] = False
    found: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    at = chosen[:0]

    def note(graft: Any, args: Any) -> None:
        mixer, hidden, streams = args[:3]
        q, k = (at_least_float32(each) for each in graft.queries_and_keys(mixer, hidden, streams, None, None, None))
        for pair, places in enumerate(served(graft)):
            site = Site(mixer.layer_idx, tuple(graft.heads[place] for place in places))
            scores = q[:, pair] @ k[:, pair].mT
            if graft.time_step and streams.write is not None:
                scores = scores + streams.write[..., list(site.heads)].mean(-1).clamp_min(SMALLEST).log()[:, None]
            lse = scores.masked_fill(later.to(scores.device), -torch.inf).logsumexp(-1)
            both = tuple(each[at.to(each.device)].double().cpu() for each in (lse, q[:, pair]))
            for name in site.head_names:
                found[name].append(both)  # type: ignore[arg-type]

    handles = [mixer.graft.register_forward_pre_hook(note) for mixer in hybrid.own_mixers()]
    device = next(hybrid.parameters()).device
    for some, at in zip(ids.split(batch_size), chosen.split(batch_size), strict=True):  # noqa: B007
        hybrid(input_ids=some.to(device), use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return {name: (torch.cat([lse for lse, _ in parts]), torch.cat([q for _, q in parts])) for name, parts in found.items()}


def fit_logistic(lse: Tensor, q: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """w (width,) and b of the logistic regression with the logits lse - b - w . q, in float64."""
    mean, spread = q.mean(0), q.std(0) + 1e-6
    unit = (q - mean) / spread
    found = torch.zeros(q.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([found], max_iter=400, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        found.grad = None
        logits = lse - found[-1] - unit @ found[:-1]
        entropy = F.binary_cross_entropy_with_logits(logits, target, weights, reduction="sum")
        total = entropy + RIDGE * found[:-1].square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(loss)
    w = found[:-1].detach() / spread
    return w, float(found[-1].detach() - mean @ w)
