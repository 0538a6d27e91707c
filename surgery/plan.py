"""The plan: the frozen record of sites, graft kind and initialisation. It is the only thing that splice obeys."""

from typing import Literal

from pydantic import Field, field_validator

from surgery.records import Provenance, Record
from surgery.site import Site, SiteText


class Start(Record):
    """What the dual start leaves open for a head: the sign of its scores (kept for good) and their scale (trained)."""

    sign: Literal[1, -1] = 1
    tau: float = Field(default=1.0, gt=0)


class Plan(Record):
    """Where attention goes and how it starts.

    sites: heads, one site a layer. starts: by head ("L1.H3"); a head that is not named starts with sign 1 and scale 1.
    time_step: add log dt to the scores. width: of queries and keys; None means the state size, and at least 32. shared: one
    query-key pair per B/C group instead of one per head. blend: None puts attention in place of the SSM; a number from 0 to 1
    keeps both under a learned gate that starts there (at 0 the hybrid equals the base exactly).
    """

    sites: tuple[SiteText, ...]
    starts: dict[str, Start] = {}
    kind: Literal["head"] = "head"
    init: Literal["dual"] = "dual"
    time_step: bool = True
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

    def start(self, layer: int, head: int) -> Start:
        """The start of one head."""
        return self.starts.get(str(Site(layer, (head,))), Start())
