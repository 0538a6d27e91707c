"""The plan: which heads become attention, and how the attention starts. `splice` obeys the plan and nothing else."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from surgery.records.record import Provenance, Record
from surgery.records.site import Site, SitesText, merge_sites


class Start(Record):
    """How the attention of one head starts."""

    sign: Literal[1, -1] = 1
    """sigma, the sign of its scores and of its output; it is not trained."""
    tau: float = Field(default=1.0, ge=1e-6, le=1e6)
    """The factor of its scores (an inverse temperature); it is trained."""
    null: float | None = None
    """The logit of its null key, in nats; None: there is none, and attention acts at every token."""
    null_query: tuple[float, ...] = ()
    """w: for a query q of the head, sigma and tau included, the null key's logit is null + w . q. Empty: null alone."""


class Plan(Record):
    """Where attention goes and how it starts."""

    schema_version: Literal[2] = 2
    kind: Literal["head", "layer"] = "head"
    """`head`: attention at some heads inside the SSM mixer. `layer`: ordinary attention in the place of the whole mixer."""
    sites: Annotated[SitesText, AfterValidator(merge_sites)]
    """For kind head: heads ("L1.H3,5"), one site a layer. For kind layer: layers ("L3")."""
    starts: dict[str, Start] = {}
    """Head ("L1.H3") -> its start. A head that is not named starts with sign 1, tau 1 and no null key. For kind head."""
    gate: float = Field(default=1.0, ge=0, le=1)
    """g at the start: the share of attention where the graft is open (docs/derivations.md). For kind head."""
    closed_below: float = Field(default=0.0, ge=0, lt=1)
    """In inference a graft whose open share m is below this value leaves its head as the base has it. For kind head."""
    width: int | None = Field(default=None, ge=1, le=2**14)
    """Width of queries and keys; by default the state size, and at least 32."""
    donor: str | None = None
    """A Transformer whose attention weights a layer graft starts from; None: it starts at random. For kind layer."""
    donor_layers: dict[Annotated[str, Field(pattern=r"^L\d{1,9}$")], Annotated[int, Field(ge=0)]] = {}
    """Layer -> the donor's layer ("L3" -> 7); by default the same number. For kind layer."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of what starts at random."""
    provenance: Provenance | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.sites:
            raise ValueError("sites: a plan needs at least one")
        for site in self.sites:
            if bool(site.heads) != (self.kind == "head"):
                raise ValueError(
                    f"sites: {site} {'names' if site.heads else 'needs'} heads, and the plan's kind is {self.kind}"
                )
        heads = {name for site in self.sites for name in site.head_names}
        if strays := sorted(set(self.starts) - heads):
            raise ValueError(f"starts: {strays[0]} is not among the sites")
        return self

    def start(self, layer: int, head: int) -> Start:
        """The start of one head."""
        return self.starts.get(str(Site(layer, (head,))), Start())
