"""The plan: the frozen record of sites, graft kind and initialisation. It is the only thing that splice obeys."""

from typing import Literal

from pydantic import Field, field_validator

from surgery.records import Provenance, Record
from surgery.site import Site, SiteText


class Plan(Record):
    """Where attention goes and how it starts.

    sites: heads, one site a layer. width: of queries and keys; None means the state size, and at least 32. shared: one
    query-key pair per B/C group instead of one per head. blend: None puts attention in place of the SSM; a number from 0 to 1
    keeps both under a learned gate that starts there (at 0 the hybrid equals the base exactly).
    """

    sites: tuple[SiteText, ...]
    kind: Literal["head"] = "head"
    init: Literal["dual"] = "dual"
    width: int | None = Field(default=None, ge=1)
    shared: bool = False
    blend: float | None = Field(default=None, ge=0, le=1)
    seed: int = 0
    provenance: Provenance | None = None

    @field_validator("sites")
    @classmethod
    def _merge(cls, sites: tuple[Site, ...]) -> tuple[Site, ...]:
        """One site a layer, in order; `L1.H3` and `L1.H6` become `L1.H3,6`."""
        layers: dict[int, tuple[int, ...]] = {}
        for site in sites:
            if not site.heads:
                raise ValueError(f"{site} names no heads; a head graft needs them, e.g. {site}.H0")
            layers[site.layer] = (*layers.get(site.layer, ()), *site.heads)
        return tuple(Site(layer, heads) for layer, heads in sorted(layers.items()))
