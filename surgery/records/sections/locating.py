"""How heads are ranked, and which of them become attention."""

from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from surgery.records.plan import Plan
from surgery.records.record import first_line
from surgery.records.sections.section import EXAMPLES, FACTOR, STEPS, Count, Examples, Name, Rows, Section, Tokens, Width
from surgery.records.site import Site, SitesText


class ProbeChoice(Section):
    """A probe and its options."""

    section = "locate.also"

    probe: str = "kv"
    """A probe by name (`surgery list probes`)."""
    options: dict[str, Any] = Field(default_factory=lambda fields: {"pairs": 32} if fields["probe"] == "kv" else {})
    """The probe's options. For kv, 32 pairs by default."""


class Locate(ProbeChoice):
    """How the heads of a model are ranked. Choose probe and options such that the base is neither perfect nor at chance."""

    section = "locate"

    examples: int = Field(default=256, ge=2, le=EXAMPLES)
    """Questions that the model answers."""
    exact: float | None = Field(default=None, ge=0, le=1)
    """The share of the heads that are also measured one by one: those that lead by attribution, which takes one forward and
    backward for all heads. true or 1: all; false or 0: none. By default all, if that takes at most ten minutes by the time of
    one forward of the model."""
    init: Literal["dual", "induction"] = "dual"
    """How grafts of heads start, here and in the plan. dual: as the head's own SSM. induction: as an induction head, which
    looks for the same token before; for a base whose own heads do not choose among tokens. In families like mamba2."""
    layers: bool = True
    """Also measure whole layers."""
    ablation: Literal["zero", "mean", "resample"] = "zero"
    """What replaces an ablated head: nothing, its mean, or its values on another example."""
    batch_size: Rows = 32
    """Questions in a forward pass. Unless it is set, attribution takes fewer at a time where they do not fit into memory."""
    seeds: int = Field(default=1, ge=1, le=100)
    """Repeat the ranking with the questions of this many seeds, and report how well the rankings agree."""
    also: tuple[ProbeChoice, ...] = ()
    """Repeat the ranking with these probes, too, and report how well the rankings agree."""


class Auto(Section):
    """How `plan.heads: auto` adds head after head, and how it and `plan.by` stay within bounds. What counts is what
    tuning will minimise: the loss on questions of locate.probe, other ones than those that ranked the heads, and the loss on
    text, which a graft must not hurt. A plan that costs another skill of the base (data.skills) more than the bounds, or may do
    so by its 95% interval, is not taken: untrained, and once more after a few steps of tuning."""

    section = "plan.auto"

    max_heads: Count = 8
    """At most this many heads."""
    candidates: Count = 4
    """How many of the leading heads each round tries to add to the plan. The second best head by itself need not be the best
    one to add: heads can replace each other."""
    examples: int = Field(default=128, ge=2, le=EXAMPLES)
    """Questions for each measurement."""
    windows: Examples = 32
    """Windows of text for each measurement, of tune.text_tokens tokens. Four times as many are measured where these leave open
    whether the loss stays within text_bound."""
    text_weight: float = Field(default=4.0, ge=0, le=FACTOR, allow_inf_nan=False)
    """How much a nat of loss per token of text counts, relative to one per question: a question is one token among many."""
    least_gain: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """A head is worth its cache, which grows with every token, if it saves this many nats, and the 95% interval of what it
    saves excludes 0. At .02, right answers become 2% more probable."""
    skill_examples: int = Field(default=512, ge=2, le=EXAMPLES)
    """Questions about each other skill, for each measurement."""
    accuracy_bound: float = Field(default=0.02, ge=0, le=1)
    """The accuracy on each other skill may fall by this much."""
    text_bound: float = Field(default=0.01, ge=0, le=FACTOR, allow_inf_nan=False)
    """The loss on text may rise by this many nats per token."""
    finalists: Count = 3
    """This many of the best plans within the bounds are tuned for a few steps, and the best of them is taken."""
    steps: int = Field(default=25, ge=0, le=STEPS)
    """Those few steps. 0: the best plan untrained is taken."""
    gates: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] = (0.1, 0.25, 0.5, 1.0)
    """The gates that are tried, unless plan.blend says which; at 1, attention replaces the SSM, without a gate. With another by
    than gain all heads share one gate, the largest within the bounds."""


class WindowOptions(Section):
    """Which heads of the model's own attention read the first tokens of a row and the latest ones, and keep no other keys.
    Heads that share keys, a group, have one window together. Groups whose window alone costs the questions least come first."""

    section = "plan.window"

    groups: Annotated[Count | Literal["auto"], Field(union_mode="left_to_right")] = "auto"
    """How many groups have a window. auto: as many as stay within the bounds of plan.auto, which here hold for the answers to
    locate.probe, too; with plan.cache_budget, as many as that takes."""
    sites: SitesText | None = None
    """These heads instead, e.g. L1.H0,1;L3.H2,3."""
    first: int = Field(default=4, ge=1, lt=2**20)
    """How many of the first tokens they read."""
    length: int = Field(default=256, ge=2, lt=2**24)
    """How many of the latest tokens they read. The questions that are measured have to be longer."""


class CacheBudget(Section):
    """What the cache of a row may take, grafts, windows and states together."""

    section = "plan.cache_budget"

    bytes: int = Field(ge=1, le=2**60)
    """At most this many bytes."""
    tokens: Tokens
    """After this many tokens."""


class PlanOptions(Section):
    """Which sites become attention, and how the attention starts."""

    section = "plan"

    kind: Literal["head", "layer", "window"] = "head"
    """`head`: attention inside the SSM's mixer, at chosen heads. `layer`: attention instead of the whole mixer. `window`: no
    graft, but windows for heads of the model's own attention (section plan.window)."""
    heads: Annotated[Count | Literal["auto"], Field(union_mode="left_to_right")] = 1
    """How many of the leading heads are grafted. auto: heads are added while the next one is worth its cache, by measuring what
    it saves (with by: choice, what a perfect choice there would save; section plan.auto). For kind head."""
    by: Name = "gain"
    """How heads are chosen (`surgery list ways`). gain: the leading heads of the ranking. All other ways measure plans on the
    model, on questions and text as plan.auto says, and stay within its bounds. For kind head."""
    layers: Count = 1
    """How many of the leading layers are grafted. For kind layer."""
    sites: SitesText | None = None
    """These sites instead of the leading ones, e.g. L1.H3,5;L2.H0."""
    init: Literal["dual", "induction", "copy"] | None = None
    """How grafts of heads start; by default as locate.init says. copy: an added copy mechanism instead of an edit of located
    heads: induction heads with values of their own, which make the token that they find more likely. They are added to the
    layer's output, times `blend`: only the layer matters, not the head. In mamba2 and llamba."""
    donor: Name | None = None
    """A Transformer whose layers the grafts start from: a folder, or an id of the Hub. For kind layer."""
    donor_layers: dict[str, int] = {}
    """Layer of the model -> number of the donor's layer, e.g. {L3: 7}; the same number where a layer is not named."""
    mlp: bool = False
    """The donor's MLP and norms come too. For kind layer with a donor."""
    width: Width | None = None
    """Width of queries and keys. By default the state size, and at least 32, or the donor's. For a layer without a donor: of a
    head, by default 64 where that divides the hidden size."""
    shared: bool = False
    """One query-key pair for each B/C group instead of one for each head."""
    blend: float | None = Field(default=None, ge=0, le=1)
    """Keep SSM and attention both, under a learned gate that starts here (at 0 the hybrid equals the base exactly). By default
    attention replaces the SSM. For kind head."""
    state_size: Count | None = None
    """The heads that stay an SSM keep this many dimensions of their state, those that text needs most; by default all. In mamba
    and mamba2, for kind head."""
    window: WindowOptions | None = None
    """Windows for heads of the model's own attention (section plan.window): for kind window, or in addition to grafts of kind
    head."""
    cache_budget: CacheBudget | None = None
    """What the cache may take, grafts included: windows are added until it fits (section plan.cache_budget)."""
    auto: Auto = Auto()
    """How heads: auto adds heads (section plan.auto)."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse what no plan can be made of, before anything is located."""
        layer = self.kind == "layer"
        if self.window is None and (self.kind == "window" or self.cache_budget is not None):
            vars(self)["window"] = WindowOptions()
        if layer and self.window is not None:
            raise ValueError("window: is for kind window, and for kind head in addition to grafts")
        if self.kind == "window":
            return self._alone()
        if layer and self.heads != 1:
            raise ValueError("heads: counts heads, and kind is layer; set plan.layers")
        if not layer and self.layers != 1:
            raise ValueError("layers: counts layers, and kind is head; set plan.heads, or plan.kind=layer")
        if self.by != "gain" and (layer or self.sites is not None or self.donor is not None):
            raise ValueError(
                f"by: {self.by} finds heads (plan.heads) of kind head, which start from their own weights; leave out kind, "
                "sites and donor"
            )
        if self.state_size is not None and layer:
            raise ValueError("state_size: is for kind head, which leaves a part of the mixer an SSM; leave out kind")
        if self.donor is not None and not layer:
            raise ValueError("donor: is for kind layer; heads start from their own weights")
        if self.sites is not None and not self.sites:
            raise ValueError("sites: is empty; leave it out to plan the leading ones")
        try:
            self.trial()
        except pydantic.ValidationError as error:
            raise ValueError(first_line(error)) from error
        if self.grows and self.sites is not None:
            raise ValueError("heads: auto chooses the heads, and sites names them; leave out one")
        return self

    def _alone(self) -> Self:
        """Windows without grafts."""
        own = {"kind", "window", "cache_budget", "auto"}
        fields = type(self).model_fields.items()
        if strays := sorted(name for name, each in fields if name not in own and getattr(self, name) != each.get_default()):
            raise ValueError(f"{strays[0]}: is for grafts, and kind is window; the heads of windows are in plan.window")
        return self

    @property
    def grows(self) -> bool:
        """Whether the number of heads is found by measuring."""
        return self.heads == "auto"

    @property
    def measures(self) -> bool:
        """Whether the heads are found by measuring plans of the model."""
        return self.grows or self.by != "gain"

    @property
    def opens(self) -> bool:
        """Whether planning takes the model, beside its ranking."""
        return self.measures or self.state_size is not None or self.window is not None

    @property
    def counted(self) -> int:
        """The number of heads, or the most that there can be."""
        return self.auto.max_heads if self.heads == "auto" else self.heads

    def given(self) -> dict[str, Any]:
        """The settings as planning takes them."""
        return self.model_dump(exclude={"auto", "by", "state_size", "window", "cache_budget"})

    def trial(self) -> Plan:
        """A plan with these settings, at the sites that are named; while it is not known which ones lead, at others in their
        place: those that donor_layers names, or the first. Raises ValidationError."""
        given = self.model_dump(exclude={"heads", "by", "layers", "sites", "state_size", "auto", "window", "cache_budget"})
        if self.init is None:
            del given["init"]
        if self.grows and self.blend is None:
            given["blend"] = self.auto.gates[0]
        named, first = tuple(map(Site.parse, self.donor_layers)), Site(0, () if self.kind == "layer" else (0,))
        return Plan(sites=self.sites or named or (first,), **given)
