"""The ranking: scores of all sites, and the plans that follow from it."""

import random
from typing import Any, Literal

from surgery.errors import UserError
from surgery.plan import Plan, Start
from surgery.records import Provenance, Record
from surgery.site import Site, SiteText
from surgery.statistics import Estimate

Role = Literal["gather", "aggregate"]


class Score(Record):
    """What a site does to the probe; accuracies are fractions, losses nats, all paired over the same examples.

    start: the sign and scale with which its graft was measured.
    ablation_drop and ablation_loss: accuracy lost, loss gained when the site is silenced. splice_gain and splice_loss:
    accuracy gained, loss *saved* when the site becomes its untrained dual graft. attribution: the first-order estimate of
    splice_loss. answer_mass and pair_mass: see roles.py.
    """

    site: SiteText
    start: Start | None = None
    ablation_drop: Estimate | None = None
    ablation_loss: Estimate | None = None
    splice_gain: Estimate | None = None
    splice_loss: Estimate | None = None
    attribution: Estimate | None = None
    answer_mass: Estimate | None = None
    pair_mass: Estimate | None = None
    role: Role | None = None


class Ranking(Record):
    """Heads, best place for a graft first, and whole layers in order."""

    provenance: Provenance
    probe: dict[str, Any]
    base_accuracy: Estimate
    base_loss: Estimate
    heads: tuple[Score, ...]
    layers: tuple[Score, ...]


def gain(score: Score) -> float:
    """What heads are sorted by: the exact loss that splicing saves, or its attribution where it was not measured."""
    estimate = score.splice_loss or score.attribution
    return estimate.value if estimate else float("-inf")


def plan(
    ranking: Ranking,
    heads: int = 1,
    *,
    sites: tuple[Site, ...] | None = None,
    width: int | None = None,
    shared: bool = False,
    blend: float | None = None,
    seed: int = 0,
) -> Plan:
    """The plan that grafts the `heads` leading heads of a ranking, or `sites` where they are given."""
    if sites is None:
        if not 1 <= heads <= len(ranking.heads):
            raise UserError(f"the ranking holds {len(ranking.heads)} heads; cannot plan {heads}")
        sites = tuple(score.site for score in ranking.heads[:heads])
    measured = {str(score.site): score.start for score in ranking.heads}
    starts = {str(head): start for site in sites for head in site.each() if (start := measured.get(str(head)))}
    return Plan(sites=sites, starts=starts, width=width, shared=shared, blend=blend, seed=seed, provenance=ranking.provenance)


def random_plan(ranking: Ranking, chosen: Plan, seed: int, *, same_layers: bool = False) -> Plan | None:
    """A control: as many heads as `chosen` grafts, each with the start that locate found best for it, drawn uniformly from the
    layers that it leaves alone (does it matter in which layer the graft sits?) or from the other heads of its own layers (at
    which heads? Mamba-2's share B and C, and often stand in for each other). None if too few heads are left to draw from."""
    taken = {head for site in chosen.sites for head in site.each()}
    layers = {site.layer for site in chosen.sites}
    free = sorted(s.site for s in ranking.heads if s.site not in taken and (s.site.layer in layers) == same_layers)
    if len(free) < len(taken):
        return None
    drawn = tuple(random.Random(f"random site {seed}").sample(free, len(taken)))
    return plan(ranking, sites=drawn, width=chosen.width, shared=chosen.shared, blend=chosen.blend, seed=chosen.seed)
