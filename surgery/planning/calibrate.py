"""Where the null key stands: b of each grafted head, such that an untrained graft is open on a given share of plain text.

m_t = sigmoid(lse_t - b), with lse_t the log-sum-exp of a token's scores (docs/derivations.md). Located heads score tens of nats
where a key matches and far less on text, so b on text leaves most answers alone (docs/claims.md).

The score says that something matches, not whose match it is: a question about another skill may score as high as an answer. The
query does tell them apart, so a null key may read it (`fit_queries`).
"""

import math
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.locating.nulls import FIRST, solve_null
from surgery.modeling.graft import SMALLEST, ChannelGraft
from surgery.modeling.reference import at_least_float32
from surgery.probes.encoded import Encoded
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.runtime.progress import bar
from surgery.splicing.splice import splice

BATCH = 8  # texts in a forward
RIDGE = 1e-5  # the weight of the squares of w, for queries of unit variance


def calibrate(model: Any, plan: Plan, rows: Tensor, share: float, batch_size: int = BATCH) -> Plan:
    """The plan with null keys: over the tokens of `rows` (texts, tokens), as the base reads them, the mean of m is `share`.

    Channels that share a query-key pair share b, and the mean is over them. It costs a forward of the base.
    """
    hybrid = splice(model, plan.model_copy(update={"gate": 0.0})).eval()  # every layer reads what it reads in the base
    read = read_matches(hybrid, rows, within(rows), batch_size)
    return start_at(
        plan, {site: {"null": round(float(solve_null(lse.flatten(), share)), 3)} for site, (lse, _) in read.items()}
    )


def fit_queries(model: Any, plan: Plan, wanted: Encoded, kept: Encoded, rows: Tensor) -> Plan:
    """The plan with null keys that read the query: m_t = sigmoid(lse_t - b - w . q_t) is a logistic regression, in which a
    graft is open (1) at the answers of `wanted`, and closed (0) on the questions `kept` and on text, `rows` (texts, tokens).
    The three count alike."""
    hybrid = splice(model, plan.model_copy(update={"gate": 0.0})).eval()  # every layer reads what it reads in the base
    texts = [(wanted.padded(), wanted.mask("query")), (kept.padded(), kept.mask("everywhere")), (rows, within(rows))]
    read = [read_matches(hybrid, ids, chosen) for ids, chosen in texts]
    found = {}
    for site in read[0]:
        kinds = [each[site] for each in read]
        weights = torch.cat([torch.full((len(lse),), 1 / len(lse)) for lse, _ in kinds]).double()
        target = torch.cat([torch.full((len(lse),), float(i == 0)) for i, (lse, _) in enumerate(kinds)]).double()
        lse, q = (torch.cat(each) for each in zip(*kinds, strict=True))
        lse = lse.logsumexp(-1) - math.log(lse.shape[-1])  # of channels that of their mean time step
        w, b = fit_logistic(lse, q, target, weights)
        found[site] = {"null": round(b, 3), "null_query": tuple(round(each, 4) for each in w.tolist())}
    return start_at(plan, found)


def start_at(plan: Plan, found: dict[Site, dict[str, Any]]) -> Plan:
    """The plan whose heads start with what was found for their sites."""
    pairs = [(name, each) for site, each in found.items() for name in site.head_names]
    return plan.model_copy(update={"starts": {n: plan.starts.get(n, Start()).model_copy(update=each) for n, each in pairs}})


def within(rows: Tensor) -> Tensor:
    """Which tokens of texts (texts, tokens) count: not the first ones, which have little before them."""
    counts = torch.ones(rows.shape, dtype=torch.bool)
    counts[:, : min(FIRST, rows.shape[1] - 1)] = False
    return counts


@torch.no_grad()
def read_matches(hybrid: Any, ids: Tensor, chosen: Tensor, batch_size: int = BATCH) -> dict[Site, tuple[Tensor, Tensor]]:
    """Heads that share a query-key pair -> at the chosen tokens, (rows, t) bool, the log-sum-exps of their scores in nats (n,
    heads) and their query (n, width)."""
    found: dict[Site, list[Any]] = defaultdict(list)
    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    at = chosen[:0]

    def note(graft: Any, args: Any) -> None:
        mixer, (hidden, streams) = args[0](), args[1:3]
        q, k = (at_least_float32(each) for each in graft.queries_and_keys(mixer, hidden, streams, None, None, None))
        served = graft.pairs if isinstance(graft, ChannelGraft) else [[place] for place in range(len(graft.heads))]
        for pair, places in enumerate(served):
            site = Site(mixer.layer_idx, tuple(graft.heads[place] for place in places))
            scores = (q[:, pair] @ k[:, pair].mT).masked_fill(later.to(q.device), -torch.inf)
            written = torch.ones_like(scores[..., : len(places)])
            if graft.time_step and streams.write is not None:
                written = streams.write[..., list(site.heads)].to(scores.dtype).clamp_min(SMALLEST)
            top = scores.amax(-1, keepdim=True)
            lse = top + ((scores - top).exp() @ written).log()
            found[site].append([each[at.to(each.device)].double().cpu() for each in (lse, q[:, pair])])

    handles = [mixer.graft.register_forward_pre_hook(note) for mixer in hybrid.own_mixers()]
    device = next(hybrid.parameters()).device
    for some, at in bar(list(zip(ids.split(batch_size), chosen.split(batch_size), strict=True)), "null keys"):  # noqa: B007
        hybrid(input_ids=some.to(device), use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return {site: (torch.cat([lse for lse, _ in parts]), torch.cat([q for _, q in parts])) for site, parts in found.items()}


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
