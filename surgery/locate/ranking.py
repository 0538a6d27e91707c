"""The ranking: scores of all sites, and the plans that follow from it."""

import random
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ValidationError

from surgery.anatomy import Kind
from surgery.digests import Conditions
from surgery.errors import UserError
from surgery.locate.stability import Stability
from surgery.plan import Plan, Start
from surgery.records import Provenance, Record, Sealed, first_line
from surgery.site import Site, SiteText, split_sites
from surgery.statistics import Estimate

Role = Literal["gather", "aggregate"]


class Score(Record):
    """What a site does to the probe; accuracies are fractions, losses nats, all paired over the same examples. Each has its own
    95% interval: of 100 heads that do nothing, about 5 have one that leaves out 0. role alone is corrected for that (roles.py).

    kind: of the head's mixer. start: the sign and scale with which its graft was measured.
    ablation_drop and ablation_loss: accuracy lost, loss gained when the site is ablated (how: the ranking's probe says).
    splice_gain and splice_loss: accuracy gained, loss *saved* when the site becomes its untrained dual graft. attribution:
    the slope of that loss where a gate begins to open to the graft, in nats per unit of gate. It ranks heads; it is no estimate
    of splice_loss, which it can exceed many times over. answer_mass and pair_mass: see roles.py.

    None: not measured (see locate), or nothing of the kind: a family without grafts has no splice and no attribution, and some
    mixers' matrices cannot be had.
    """

    site: SiteText
    kind: Kind | None = None
    start: Start | None = None
    ablation_drop: Estimate | None = None
    ablation_loss: Estimate | None = None
    splice_gain: Estimate | None = None
    splice_loss: Estimate | None = None
    attribution: Estimate | None = None
    answer_mass: Estimate | None = None
    pair_mass: Estimate | None = None
    role: Role | None = None


class Ranking(Sealed):
    """Heads, best place for a graft first (or, in a family without grafts, the one whose ablation costs most), and whole layers
    in order. drawn: heads that were measured exactly not because they led but at random, as a control of what did not lead.
    stability: whether other questions rank the same heads first, if that was asked. conditions, questions: which weights were
    ranked, with what, and a digest of what they were asked (versions up to 0.5.1 did not say)."""

    provenance: Provenance
    conditions: Conditions | None = None
    questions: str | None = None
    probe: dict[str, Any]
    base_accuracy: Estimate
    base_loss: Estimate
    heads: tuple[Score, ...]
    layers: tuple[Score, ...]
    drawn: tuple[SiteText, ...] = ()
    stability: Stability | None = None


def gain(score: Score) -> tuple[int, float]:
    """What heads are sorted by: the exact loss that splicing saves; behind those, its attribution where it was not measured;
    behind those, the loss that ablation costs, where nothing can be spliced."""
    for order, estimate in ((3, score.splice_loss), (2, score.attribution), (1, score.ablation_loss)):
        if estimate is not None:
            return order, estimate.value
    return 0, 0.0


def plan(
    ranking: Ranking,
    heads: int = 1,
    *,
    kind: Literal["head", "layer"] = "head",
    layers: int = 1,
    sites: str | Sequence[Site | str] | None = None,
    donor: str | None = None,
    donor_heads: dict[str, Site] | None = None,
    donor_layers: dict[str, int] | None = None,
    mlp: bool = False,
    width: int | None = None,
    shared: bool = False,
    blend: float | None = None,
    seed: int | None = None,
) -> Plan:
    """The plan that grafts the `heads` leading heads of a ranking (or, of the kind "layer", its `layers` leading layers), or
    `sites` where they are given, also as text ("L1.H3,5"). seed: the ranking's, unless given. The rest as in Plan. Raises
    UserError for what does not fit together."""
    measured, wanted = (ranking.layers, layers) if kind == "layer" else (ranking.heads, heads)
    if sites is None:
        if not 1 <= wanted <= len(measured):
            raise UserError(f"the ranking holds {len(measured)} {kind}s; cannot plan {wanted}")
        leading = sorted(measured, key=gain, reverse=True)
        if gain(leading[0])[0] < 2:  # ordered by ablation
            raise UserError("the ranking is of a model that cannot be spliced: its family has no file in surgery/families/")
        sites = tuple(score.site for score in leading[:wanted])
    chosen: tuple[Site, ...] = split_sites(sites)
    if not chosen:
        raise UserError("plan.sites is empty; leave it out to plan the leading ones")
    fields: dict[str, Any] = {"kind": kind, "sites": chosen, "width": width, "provenance": ranking.provenance}
    fields |= {"donor": donor, "donor_heads": donor_heads or {}, "donor_layers": donor_layers or {}, "mlp": mlp}
    fields |= {"shared": shared, "blend": blend, "seed": ranking.provenance.seed if seed is None else seed}
    if kind == "head" and donor is None:
        found = {str(score.site): score.start for score in ranking.heads}
        fields["starts"] = {str(head): start for site in chosen for head in site.each() if (start := found.get(str(head)))}
    try:
        made = Plan(**fields)
    except ValidationError as error:
        raise UserError(f"plan: {first_line(error)}") from error
    _check_sites(ranking, made)
    return made


def _check_sites(ranking: Ranking, chosen: Plan) -> None:
    """Refuse sites that the ranked model does not have: splice would, but it has to load the model first."""
    heads = {score.site for score in ranking.heads}
    layers = {site.layer for site in heads} | {score.site.layer for score in ranking.layers}
    for site in chosen.sites:
        strays = [head for head in site.each() if head not in heads]
        if site.layer not in layers:
            raise UserError(f"plan: the ranked model has no site {site}: its layers are {min(layers)} to {max(layers)}")
        if strays:
            count = sum(head.layer == site.layer for head in heads)
            raise UserError(f"plan: the ranked model has no site {strays[0]}: layer {site.layer} has {count} heads, from 0")


def random_plan(ranking: Ranking, chosen: Plan, seed: int, *, same_layers: bool = False) -> Plan | None:
    """A control: as many heads as `chosen` grafts, each with the start that locate found best for it, drawn uniformly from the
    layers that it leaves alone (does it matter in which layer the graft sits?) or from the other heads of its own layers (at
    which heads? Mamba-2's share B and C, and often stand in for each other); or as many other layers, each from the donor's of
    the same number. None if too few are left to draw from."""
    taken = {part for site in chosen.sites for part in (site.each() or (site,))}
    layers = {site.layer for site in chosen.sites}
    measured = ranking.layers if chosen.kind == "layer" else ranking.heads
    free = sorted(s.site for s in measured if s.site not in taken and (s.site.layer in layers) == same_layers)
    if len(free) < len(taken):
        return None
    drawn = tuple(random.Random(f"random site {seed}").sample(free, len(taken)))
    return plan(
        ranking, kind=chosen.kind, sites=drawn, donor=chosen.donor, mlp=chosen.mlp, width=chosen.width, shared=chosen.shared,
        blend=chosen.blend, seed=chosen.seed,
    )  # fmt: skip
