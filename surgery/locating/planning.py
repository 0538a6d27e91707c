"""From a ranking to a plan: its leading heads or layers, sites that are named, or random ones as a control."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from surgery.errors import UserError
from surgery.loading.opened import a_type
from surgery.locating.heads import gain
from surgery.locating.ranking import Ranking
from surgery.records.plan import Plan
from surgery.records.record import first_line
from surgery.records.site import Site, split_sites


def plan(
    ranking: Ranking,
    heads: int | Literal["auto"] = 1,
    *,
    kind: Literal["head", "layer", "window"] = "head",
    layers: int = 1,
    sites: str | Sequence[Site | str] | None = None,
    init: Literal["dual", "induction", "copy"] | None = None,
    donor: str | None = None,
    donor_layers: dict[str, int] | None = None,
    mlp: bool = False,
    width: int | None = None,
    shared: bool = False,
    blend: float | None = None,
    seed: int | None = None,
) -> Plan:
    """The plan that grafts the `heads` leading heads of a ranking (or, of the kind "layer", its `layers` leading layers), or
    `sites` where they are given, also as text ("L1.H3,5"). init, seed: the ranking's, unless given. The rest as in Plan. Raises
    UserError for what does not fit together."""
    if not isinstance(ranking, Ranking):
        advice = f"surgery.Ranking.read({str(ranking)!r})" if isinstance(ranking, str | Path) else "surgery.locate makes one"
        raise UserError(f"surgery.plan takes a Ranking, not {a_type(ranking)}: {advice}")
    if heads == "auto":
        raise UserError("plan.heads=auto measures the model: use surgery.grow(model, ranking), `surgery plan` or `surgery run`")
    if kind == "window":
        raise UserError("plan.kind=window measures the ranked model: use `surgery plan`")
    measured, count = (ranking.layers, layers) if kind == "layer" else (ranking.heads, heads)
    if sites is None:
        if not isinstance(count, int) or not 1 <= count <= len(measured):
            raise UserError(f"the ranking holds {len(measured)} {kind}s; cannot plan {count}")
        leading = sorted(measured, key=gain, reverse=True)[:count] if kind == "layer" else ranking.columns.sorted()[:count]
        if gain(leading[0])[0] < 2:  # ordered by ablation
            raise UserError(
                "the ranking is of a model that cannot be spliced: it has grafts already, or no family has its model type"
            )
        sites = tuple(score.site for score in leading)
    chosen: tuple[Site, ...] = split_sites(sites)
    if not chosen:
        raise UserError("plan.sites is empty; leave it out to plan the leading ones")
    fields: dict[str, Any] = {"kind": kind, "sites": chosen, "width": width, "provenance": ranking.provenance}
    fields |= {"donor": donor, "donor_layers": donor_layers or {}, "mlp": mlp}
    fields |= {"shared": shared, "blend": blend, "seed": ranking.provenance.seed if seed is None else seed}
    if init is not None:
        fields["init"] = init
    if kind == "head":
        fields["init"] = init or ranking.init
    if fields.get("init") == ranking.init:  # a start that is best for another one says nothing
        parts = [head for site in chosen for head in site.each()]
        places = ranking.columns.find(parts)
        starts = {str(head): ranking.columns.start(i) for head, i in zip(parts, places, strict=True) if i is not None}
        fields["starts"] = {head: start for head, start in starts.items() if start is not None}
    if kind == "head":
        fields["at_risk"] = ranking.at_risk(head for site in chosen for head in site.each())
    try:
        complete = Plan(**fields)
    except ValidationError as error:
        raise UserError(f"plan: {first_line(error)}") from error
    _check_sites(ranking, complete)
    return complete


def _check_sites(ranking: Ranking, chosen: Plan) -> None:
    """Refuse sites that the ranked model does not have: splice would, but it has to load the model first."""
    heads = ranking.columns
    layers = {*np.unique(heads.layer).tolist(), *(score.site.layer for score in ranking.layers)}
    for site in chosen.sites:
        strays = [head for head, i in zip(site.each(), heads.find(site.each()), strict=True) if i is None]
        if site.layer not in layers:
            raise UserError(f"plan: the ranked model has no site {site}: its layers are {min(layers)} to {max(layers)}")
        if strays:
            count = int((heads.layer == site.layer).sum())
            raise UserError(f"plan: the ranked model has no site {strays[0]}: layer {site.layer} has {count} heads, from 0")


def random_plan(ranking: Ranking, chosen: Plan, seed: int, *, same_layers: bool = False) -> Plan | None:
    """A control: as many heads as `chosen` grafts, each with the start that locate found best for it, drawn uniformly from the
    layers that it leaves alone (does it matter in which layer the graft sits?) or from the other heads of its own layers (at
    which heads? Mamba-2's share B and C, and often stand in for each other); or as many other layers, each from the donor's of
    the same number. None if too few are left to draw from."""
    taken = {part for site in chosen.sites for part in (site.each() or (site,))}
    layers = {site.layer for site in chosen.sites}
    generator = random.Random(f"random site {seed}")
    if chosen.kind == "layer":
        free = sorted(s.site for s in ranking.layers if s.site not in taken and (s.site.layer in layers) == same_layers)
        drawn = generator.sample(free, len(taken)) if len(free) >= len(taken) else None
    else:
        heads = ranking.columns
        numbers = np.lexsort((heads.head, heads.layer))
        numbers = numbers[np.isin(heads.layer[numbers], list(layers)) == same_layers]
        known = [i for i in heads.find(taken) if i is not None]
        alike = np.isin(heads.kind[numbers], heads.kind[known])  # attention takes no graft
        numbers = numbers[alike & ~np.isin(numbers, known)]
        few = len(numbers) < len(taken)
        drawn = None if few else [heads.site(i) for i in generator.sample(numbers.tolist(), len(taken))]
    if drawn is None:
        return None
    init: Any = None if chosen.init in ("donor", "random") else chosen.init
    other = plan(
        ranking, kind=chosen.kind, sites=tuple(drawn), donor=chosen.donor, mlp=chosen.mlp, width=chosen.width,
        shared=chosen.shared, blend=chosen.blend, seed=chosen.seed,
        init=init,
    )  # fmt: skip
    # The same hints as the chosen heads, so that these are not what makes the difference.
    places = dict(zip((str(head) for site in other.sites for head in site.each()), chosen.places.values(), strict=False))
    return other.model_copy(update={"kept_state": chosen.kept_state, "places": places, "windows": chosen.windows})
