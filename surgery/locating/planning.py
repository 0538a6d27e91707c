"""From a ranking to a plan: its leading heads or layers, sites that are named, or random ones as a control."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from surgery.errors import UserError
from surgery.loading.opened import a_type
from surgery.locating.ranking import Ranking, gain
from surgery.records.plan import Plan
from surgery.records.record import first_line
from surgery.records.site import Site, split_sites


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
    if not isinstance(ranking, Ranking):
        advice = f"surgery.Ranking.read({str(ranking)!r})" if isinstance(ranking, str | Path) else "surgery.locate makes one"
        raise UserError(f"surgery.plan takes a Ranking, not {a_type(ranking)}: {advice}")
    measured, count = (ranking.layers, layers) if kind == "layer" else (ranking.heads, heads)
    if sites is None:
        if not isinstance(count, int) or not 1 <= count <= len(measured):
            raise UserError(f"the ranking holds {len(measured)} {kind}s; cannot plan {count}")
        leading = sorted(measured, key=gain, reverse=True)
        if gain(leading[0])[0] < 2:  # ordered by ablation
            raise UserError(
                "the ranking is of a model that cannot be spliced: it has grafts already, or its family has no file in "
                "surgery/families/"
            )
        sites = tuple(score.site for score in leading[:count])
    chosen: tuple[Site, ...] = split_sites(sites)
    if not chosen:
        raise UserError("plan.sites is empty; leave it out to plan the leading ones")
    fields: dict[str, Any] = {"kind": kind, "sites": chosen, "width": width, "provenance": ranking.provenance}
    fields |= {"donor": donor, "donor_heads": donor_heads or {}, "donor_layers": donor_layers or {}, "mlp": mlp}
    fields |= {"shared": shared, "blend": blend, "seed": ranking.provenance.seed if seed is None else seed}
    if kind == "head" and donor is None:
        start_of = {str(score.site): score.start for score in ranking.heads}
        fields["starts"] = {str(head): start for site in chosen for head in site.each() if (start := start_of.get(str(head)))}
    try:
        complete = Plan(**fields)
    except ValidationError as error:
        raise UserError(f"plan: {first_line(error)}") from error
    _check_sites(ranking, complete)
    return complete


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
