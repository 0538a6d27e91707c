"""The ranking: scores of all sites, as a table, a data frame and a figure."""

import math
from functools import partial
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

from surgery.errors import UserError
from surgery.loading.digests import Conditions
from surgery.locating.questions import described
from surgery.locating.stability import ScoreName, Stability
from surgery.models.anatomy import Kind
from surgery.records.names import called
from surgery.records.plan import Start
from surgery.records.record import Provenance, Record, Sealed
from surgery.records.site import SiteText
from surgery.statistics import Accuracy, Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Role = Literal["gather", "aggregate"]
SHOWN = 10  # heads, where it is not said how many
COLUMNS = ("splice_loss", "splice_gain", "attribution", "ablation_loss", "ablation_drop", "answer_mass", "pair_mass")
# Of them a table has the first three that were measured, so that it fits 80 columns.
LEGEND = {
    "splice_loss": "nats of loss saved when the head becomes attention, untrained",
    "attribution": "the slope of that (nats per unit of gate): it ranks heads, no more",
    "ablation_loss": "nats of loss that leaving the head out costs",
    "ablation_drop": "accuracy that leaving the head out costs",
}


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

    @property
    def score(self) -> ScoreName:
        """What the leading heads are sorted by."""
        best = gain(self.heads[0])[0] if self.heads else 0
        return next((name for order, name in ORDER if order == best), "splice_loss")

    def top(self, k: int = SHOWN) -> tuple[Score, ...]:
        """The k leading heads' scores, best first (of all heads, if there are fewer). Raises UserError for a k below 1."""
        if not isinstance(k, int) or k < 1:
            raise UserError(f"Ranking.top takes a number of heads from 1 on, not {k}")
        return self.heads[:k]

    def table(self, k: int = SHOWN) -> tuple[list[str], list[list[str]]]:
        """Header and body: the k leading heads and what was measured of them; what they are sorted by, with its interval."""
        first, *others = names = self._shown()
        body = []
        for score in self.top(k):
            cells = [str(getattr(score, first) or ""), *(_cell(score, name) for name in others)]
            body.append([str(score.site), score.role or "", *cells])
        return ["site", "role", *(name.replace("_", " ") for name in names)], body

    def _shown(self) -> list[str]:
        """The scores in a table, first what the heads are sorted by."""
        others = [name for name in LEGEND if name != self.score and any(getattr(score, name) for score in self.top())]
        return [self.score, *others[:2]]

    def to_pandas(self) -> "DataFrame":
        """A row for every head, in the ranking's order: site, layer, head, kind, role, drawn, sign and tau (of its start), and
        for each score of COLUMNS its value, and under <score>_low, <score>_high and <score>_n the 95% interval and the number
        of examples. NaN (n: 0) where it was not measured. Raises UserError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("Ranking.to_pandas needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame([_row(score, drawn=score.site in self.drawn) for score in self.heads])

    def plot(self) -> "Figure":
        """A matplotlib figure: heat maps layer x head, one for every score that was measured, with letters at aggregate and
        gather heads, and the leading heads as bars. A notebook shows it; for a file, call its savefig."""
        from surgery.locating.atlas import draw_scores

        figure = draw_scores(self)
        vars(figure)["_repr_png_"] = partial(_png, figure)  # for notebooks, whatever their backend
        return figure

    def __str__(self) -> str:
        header, body = self.table()
        widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
        rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *body)]
        return "\n".join([*self._caption(), *rows, *self._notes(len(body))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks."""
        header, body = self.table()
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
        caption, notes = ("<br>".join(map(escape, lines)) for lines in (self._caption(), self._notes(len(body))))
        return f"<p>{caption}</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{notes}</p>"

    def _caption(self) -> list[str]:
        probe = described(self.probe.get("name", "?"), self.probe.get("options", {}))
        return [
            f"Ranking of {called(self.provenance.base)}: {len(self.heads):,} heads, by {self.score.replace('_', ' ')}",
            f"{probe}, {self.probe.get('examples', '?')} examples; base accuracy {self.base_accuracy}",
        ]

    def _notes(self, shown: int) -> list[str]:
        left = len(self.heads) - shown
        more = [f"... and {left:,} more heads: see top(k), to_pandas() and plot()"] if left > 0 else []
        return [*more, *(f"{name.replace('_', ' ')}: {LEGEND[name]}" for name in self._shown())]


# What heads are sorted by: the first of these that was measured.
ORDER: tuple[tuple[int, ScoreName], ...] = ((3, "splice_loss"), (2, "attribution"), (1, "ablation_loss"))


def gain(score: Score) -> tuple[int, float]:
    """What heads are sorted by: the exact loss that splicing saves; behind those, its attribution where it was not measured;
    behind those, the loss that ablation costs, where nothing can be spliced."""
    for order, name in ORDER:
        if (estimate := getattr(score, name)) is not None:
            return order, estimate.value
    return 0, 0.0


def _cell(score: Score, name: str) -> str:
    """A score without its interval."""
    estimate = getattr(score, name)
    return "" if estimate is None else f"{estimate.value:+.3f}"


def _png(figure: "Figure") -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()


def _row(score: Score, drawn: bool) -> dict[str, Any]:
    start = score.start
    row: dict[str, Any] = {"site": str(score.site), "layer": score.site.layer, "head": score.site.heads[0]}
    row |= {"kind": score.kind, "role": score.role, "drawn": drawn}
    row |= {"sign": math.nan if start is None else start.sign, "tau": math.nan if start is None else start.tau}
    for name in COLUMNS:
        estimate = getattr(score, name)
        row[name] = math.nan if estimate is None else estimate.value
        row[f"{name}_low"], row[f"{name}_high"] = (math.nan, math.nan) if estimate is None else estimate.ci95
        row[f"{name}_n"] = 0 if estimate is None else estimate.n
    return row


def ablation_cost(score: Score) -> float:
    """The loss that ablating a head costs; 0 where it was not measured."""
    return score.ablation_loss.value if score.ablation_loss else 0.0
