"""The ranking: scores of all sites, and the plans that follow from it."""

from typing import Any, Literal

from surgery.loading.digests import Conditions
from surgery.locating.stability import Stability
from surgery.models.anatomy import Kind
from surgery.records.plan import Start
from surgery.records.record import Provenance, Record, Sealed
from surgery.records.site import SiteText
from surgery.statistics import Accuracy, Estimate

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
    base_accuracy: of the base on the questions; chance: that of guessing. stability: whether other questions rank the same
    heads first, if that was asked. conditions, questions: which weights were ranked, with what, and a digest of what they were
    asked. Versions up to 0.5.1 did not say the last two, versions up to 0.6 no chance."""

    provenance: Provenance
    conditions: Conditions | None = None
    questions: str | None = None
    probe: dict[str, Any]
    base_accuracy: Accuracy
    chance: float | None = None
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
