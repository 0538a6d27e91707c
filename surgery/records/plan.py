"""The plan: the frozen record of sites, graft kind and initialisation. It is the only thing that splice obeys."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from surgery.records.growth import Growth
from surgery.records.names import display_name, strip_paths
from surgery.records.record import Marked, Provenance, Record
from surgery.records.site import Site, SitesText

PLAN = "plan.json"  # its file, in every folder that holds one
PATCH = "patch.json"  # of a folder that holds no whole model, but what surgery changed in one


class Start(Record):
    """What the dual start leaves open for a head."""

    sign: Literal[1, -1] = 1
    """The sign of its scores, which is not trained."""
    least: ClassVar[float] = 1e-6
    most: ClassVar[float] = 1e6
    tau: float = Field(default=1.0, ge=least, le=most)
    """The factor of its scores (an inverse temperature), which is trained."""


class PlanWindows(Record):
    """Heads of a model's own attention that read the first tokens of a row and the latest ones, and keep no other keys."""

    sites: SitesText
    """Attention heads, one site for each layer; of heads that share keys all."""
    first: int = Field(default=4, ge=1, lt=2**20)
    """How many of the first tokens they read."""
    length: int = Field(default=256, ge=2, lt=2**24)
    """How many of the latest tokens they read, the token itself among them."""

    @field_validator("sites")
    @classmethod
    def _merge(cls, sites: tuple[Site, ...]) -> tuple[Site, ...]:
        if not sites:
            raise ValueError("a plan with windows needs the sites of one at least")
        if whole := next((site for site in sites if not site.heads), None):
            raise ValueError(f"{whole} names no heads; a window needs them, e.g. {whole}.H0")
        return merged(sites)

    def __str__(self) -> str:
        return f"windows of {self.first} and {self.length} tokens at {'; '.join(map(str, self.sites))}"


def merged(sites: Iterable[Site]) -> tuple[Site, ...]:
    """One site a layer, in order; `L1.H3` and `L1.H6` become `L1.H3,6`."""
    layers: dict[int, tuple[int, ...]] = {}
    for site in sites:
        layers[site.layer] = (*layers.get(site.layer, ()), *site.heads)
    return tuple(Site(layer, heads) for layer, heads in sorted(layers.items()))


class Plan(Marked):
    """Where attention goes and how it starts, and where less of it is left."""

    kind: Literal["head", "layer", "window"] = "head"
    """`head`: attention inside the SSM's mixer. `layer`: attention instead of the whole mixer. `window`: no graft, windows
    alone."""
    sites: SitesText = ()
    """For kind head: heads, one site for each layer. For kind layer: layers ("L3"). For kind window: none."""
    windows: PlanWindows | None = Field(default=None, exclude_if=lambda windows: windows is None)
    """Heads of the model's own attention that forget. For kind window, or in addition to grafts of kind head."""
    starts: dict[str, Start] = {}
    """Head ("L1.H3") -> how it starts. A head that is not named starts with sign 1 and tau 1. For kind head."""
    init: Literal["dual", "induction", "copy", "donor", "random"] = "dual"
    """`dual`: from the SSM head's own weights; `induction`: as an induction head, whose queries match a token with the same one
    before a key; `copy`: the same, added to the SSM's heads, with values of its own, which make the token that it finds more
    likely; `donor`: from a donor's; `random`. By default a head starts dual, and a layer from its donor or at random."""
    donor: str | None = None
    """The donor's name or path. For kind layer."""
    donor_layers: dict[str, Annotated[int, Field(ge=0)]] = {}
    """Layer -> the number of the donor's layer ("L3" -> 7); the same number where a layer is not named. For kind layer."""
    mlp: bool = False
    """The donor's MLP and norms come too. For kind layer."""
    time_step: bool = True
    """Add log dt to the scores. For kind head."""
    width: int | None = Field(default=None, ge=1, le=2**14)
    """Width of queries and keys; by default the state size, and at least 32, or the donor's. For kind layer without a donor: of
    a head, by default 64 where that divides the hidden size."""
    shared: bool = False
    """One query-key pair for each B/C group instead of one for each head. For kind head."""
    blend: float | None = Field(default=None, ge=0, le=1)
    """None: attention in place of the SSM. A number: both, under a learned gate that starts there (at 0 the hybrid equals the
    base exactly). For kind head."""
    kept_state: dict[str, tuple[tuple[Annotated[int, Field(ge=0, lt=2**14)], ...], ...]] = Field(
        default={}, exclude_if=lambda kept: not kept
    )
    """Layer ("L3") -> for each of its B/C groups the dimensions that the state of its SSM keeps, as many everywhere; {}: all of
    them. For kind head."""
    places: dict[str, Annotated[int, Field(gt=-(2**14), lt=2**14)]] = Field(default={}, exclude_if=lambda places: not places)
    """Head ("L1.H3") -> where it reads an answer, in tokens before the one behind the span that holds it; negative: after it.
    For the hints of tuning (tune.hints); {}: anywhere in the span. For kind head."""
    seed: int = Field(default=0, ge=0, lt=2**52)
    """The seed of what starts at random."""
    at_risk: dict[str, tuple[str, ...]] = Field(default={}, exclude_if=lambda skills: not skills)
    """Skill -> heads of this plan at which an untrained graft costs the base that skill, as the ranking measured it
    (data.skills). For the reader; splice does not use it."""
    growth: Growth | None = Field(default=None, exclude_if=lambda growth: growth is None)
    """How its heads were found, where plan.heads is auto."""
    provenance: Provenance | None = None
    """Where the plan comes from."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        usual = "donor" if fields.get("donor") else "random" if fields.get("kind") == "layer" else "dual"
        init = fields.get("init", usual)
        if fields.get("donor_heads"):
            raise ValueError("donor_heads: went with version 0.22: heads start from their own weights; take kind: layer")
        fields = {name: value for name, value in fields.items() if name != "donor_heads"}
        return {"init": init, "time_step": init in ("dual", "induction") and fields.get("kind") != "window"} | fields

    @field_validator("sites")
    @classmethod
    def _merge(cls, sites: tuple[Site, ...], info: ValidationInfo) -> tuple[Site, ...]:
        """One site a layer, in order."""
        for site in sites:
            if info.data.get("kind") == "window":
                raise ValueError(f"{site} would be a graft; the heads of kind window are windows.sites")
            if site.heads and info.data.get("kind") == "layer":
                raise ValueError(f"{site} names heads; a layer graft takes a whole layer, e.g. L{site.layer}")
            if not site.heads and info.data.get("kind") == "head":
                raise ValueError(f"{site} names no heads; a head graft needs them, e.g. {site}.H0")
        return merged(sites)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse fields that splice would not obey."""
        if not self.sites and self.kind != "window":
            raise ValueError("a plan needs at least one site")
        if (self.kind == "window" and self.windows is None) or (self.kind == "layer" and self.windows is not None):
            raise ValueError(f"windows: kind window needs them, kind head may have them, and this is kind {self.kind}")
        starts = {"head": ("dual", "induction", "copy"), "layer": ("donor", "random"), "window": ("dual",)}[self.kind]
        if self.init not in starts:
            raise ValueError(f"init: a {self.kind} graft starts {' or '.join(starts)}, not {self.init}")
        if self.init == "copy" and self.blend is None:
            raise ValueError("blend: what a graft copies is added to the mixer's output, times blend; 0.1, say")
        donor, layer, head = self.init == "donor", self.kind == "layer", self.kind == "head"
        for name, allowed in {
            "donor": donor, "donor_layers": donor, "mlp": donor, "starts": head, "blend": head, "shared": head,
            "time_step": head, "width": head or (layer and not donor), "kept_state": head, "places": head,
        }.items():  # fmt: skip
            value = getattr(self, name)
            if not (allowed or value is None or value is False or value == {}):
                raise ValueError(f"{name}: means nothing for a {self.kind} graft that starts {self.init}")
        for name in ("donor_layers", "starts", "places"):
            named = getattr(self, name)
            planned = {str(head) for site in self.sites for head in (site.each() or (site,))} if named else set()
            if strays := sorted(set(named) - planned):  # also L01.H3, which nobody would find
                raise ValueError(f"{name}: {strays[0]} is not among the sites")
        groups = [group for groups in self.kept_state.values() for group in groups]
        if (
            any(list(group) != sorted(set(group)) for group in groups)
            or len({len(group) for group in groups}) > 1
            or () in groups
        ):
            raise ValueError("kept_state: every group keeps as many dimensions, one at least, in ascending order")
        return self

    def __repr__(self) -> str:
        gate = "" if self.blend is None else f", behind a gate that begins at {self.blend:g}"
        gate += "" if self.windows is None else f", {self.windows}"
        if not self.sites:
            return f"<Plan: {self.windows}; text() is all of it>"
        return f"<Plan: {'; '.join(map(str, self.sites))}, {self.init} start{gate}; text() is all of it>"

    @property
    def dtype(self) -> str:
        """The dtype in which the base was opened for the ranking: "auto" (as stored) or a torch name."""
        recipe = self.provenance and self.provenance.recipe
        return (recipe or {}).get("dtype", "auto")

    def start(self, layer: int, head: int) -> Start:
        """The start of one head."""
        return self.starts.get(f"L{layer}.H{head}", Start())

    def donor_layer(self, layer: int) -> int:
        """The number of the donor's layer that one layer starts from."""
        return self.donor_layers.get(str(Site(layer)), layer)


def published(plan: Plan) -> Plan:
    """The plan for others to read: base and donor by their names, without paths."""
    changes: dict[str, Any] = {"donor": plan.donor and display_name(plan.donor)}
    if plan.growth is not None:  # a probe may read a file
        changes["growth"] = plan.growth.model_copy(update={"probe": strip_paths(plan.growth.probe)})
    if (origin := plan.provenance) is not None:
        changes["provenance"] = origin.model_copy(
            update={"base": display_name(origin.base), "recipe": strip_paths(origin.recipe)}
        )
    return plan.model_copy(update=changes)
