"""The ranking: what locate measured, head by head."""

from typing import Literal

from surgery.records.plan import Start
from surgery.records.record import Provenance, Record
from surgery.records.site import SiteText


class Estimate(Record):
    """A mean with its 95% interval over n questions."""

    mean: float
    low: float
    high: float
    n: int


class Roles(Record):
    """What zeroing a head's output does to the loss, in nats a question, by where in the text it is zeroed. Intervals are
    corrected for the number of units that were tested (locating/roles.py)."""

    everywhere: Estimate
    query: Estimate
    """At the prompt's last token, and the tokens of an answer behind it."""
    evidence: Estimate
    """At the end of the span that holds the answer."""
    spans: Estimate
    """At the ends of all spans of evidence: from a span's second token to the one behind it."""
    elsewhere: Estimate
    role: Literal["gather", "aggregate", "both", "none"]
    """By arXiv 2504.18574; docs/roles.md says by which measurement."""


class HeadScore(Record):
    """One unit of the ranking: a head, or a block of channels."""

    site: SiteText
    kind: Literal["ssm", "attention"]
    slope: float
    """Splice attribution: -d loss / d gate at gate 0, in nats a question. Positive: attention there would help."""
    start: Start
    """The sign and scale with the largest slope."""
    gain: Estimate | None = None
    """Measured: nats saved a question when the head becomes untrained attention."""
    roles: Roles | None = None

    @property
    def name(self) -> str:
        """What a circuit calls it: "L1.H3", "L0.H5,24,+14"."""
        return self.site.name


class GroupScore(Record):
    """Units that are ablated together, because they can stand in for each other; or a layer's convolution."""

    name: str
    """ "L1.H3 + L1.H5", "L1", "L0 convolution"."""
    sites: tuple[SiteText, ...]
    roles: Roles


class Edge(Record):
    """How much of what a gather unit does goes through an aggregate unit."""

    source: str
    target: str
    share: float
    """Of the loss that ablating `source` at the spans' ends adds, the share that is not added where `target` is ablated too."""


class Circuit(Record):
    """The retrieval circuit as measured: who gathers, who aggregates, and a sentence that says it."""

    gather: tuple[str, ...]
    aggregate: tuple[str, ...]
    edges: tuple[Edge, ...]
    sentence: str


class Ranking(Record):
    """All units of a model, those first where attention would help most."""

    schema_version: Literal[2] = 2
    heads: tuple[HeadScore, ...]
    groups: tuple[GroupScore, ...] = ()
    circuit: Circuit | None = None
    probe: str
    """What was asked, in words: "kv, 32 pairs"."""
    accuracy: Estimate
    """Of the base on these questions."""
    chance: float
    loss: float
    """Mean loss of the base, in nats a question."""
    questions: int
    provenance: Provenance | None = None
