"""The ranking: scores of all sites, as a table, a data frame and a figure."""

from functools import partial
from html import escape
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from surgery.errors import UserError
from surgery.locating.heads import KINDS, ROLES, Score
from surgery.locating.questions import probe_in_words
from surgery.locating.ranked_heads import RankedHeads
from surgery.records.names import display_name
from surgery.runtime.listing import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

SHOWN = 10  # heads, where it is not said how many
COLUMNS = ("splice_loss", "splice_gain", "attribution", "ablation_loss", "ablation_drop", "answer_mass", "pair_mass")
# Of them a table has the first three that were measured, so that it fits 80 columns.
LEGEND = {
    "splice_loss": "nats of loss saved when the head becomes attention, untrained",
    "attribution": "the slope of that (nats per unit of gate): it ranks heads, no more",
    "ablation_loss": "nats of loss that leaving the head out costs",
    "ablation_drop": "accuracy that leaving the head out costs",
}


class Ranking(RankedHeads):
    __doc__ = RankedHeads.__doc__

    def top(self, k: int = SHOWN) -> tuple[Score, ...]:
        """The k leading heads' scores, best first (of all heads, if there are fewer). Raises UserError for a k below 1."""
        if not isinstance(k, int) or k < 1:
            raise UserError(f"Ranking.top takes a number of heads from 1 on, not {k}")
        return tuple(self.heads[:k])

    def table(self, k: int = SHOWN) -> tuple[list[str], list[list[str]]]:
        """Header and body: the k leading heads and what was measured of them; what they are sorted by, with its interval."""
        first, *others = names = self._shown()
        body = []
        for score in self.top(k):
            cells = [str(getattr(score, first) or ""), *(_cell(score, name) for name in others)]
            also = [", ".join(self.also_for(score.site))] if self.skills else []
            body.append([str(score.site), score.role or "", *cells, *also])
        return ["site", "role", *(name.replace("_", " ") for name in names), *(["also for"] if self.skills else [])], body

    def _shown(self) -> list[str]:
        """The scores in a table, first what the heads are sorted by."""
        others = [name for name in LEGEND if name != self.score and any(getattr(score, name) for score in self.top())]
        return [self.score, *others[: 1 if self.skills else 2]]

    def to_pandas(self) -> "DataFrame":
        """A row for every head, in the ranking's order: site, layer, head, kind, role, drawn, sign and tau (of its start), and
        for each score of COLUMNS its value, and under <score>_low, <score>_high and <score>_n the 95% interval and the number
        of examples. NaN (n: 0) where it was not measured. Raises UserError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("Ranking.to_pandas needs pandas, which is not installed: pip install pandas") from error
        heads = self.columns
        frame: dict[str, Any] = {
            "site": [f"L{layer}.H{head}" for layer, head in zip(heads.layer.tolist(), heads.head.tolist(), strict=True)],
            "layer": heads.layer,
            "head": heads.head,
            "kind": [KINDS[kind] for kind in heads.kind.tolist()],
            "role": [ROLES[role] for role in heads.role.tolist()],
            "drawn": np.zeros(len(heads), dtype=bool),
            "sign": heads.sign.astype(int) if heads.sign.all() else np.where(heads.sign == 0, np.nan, heads.sign),
            "tau": heads.tau,
        }
        frame["drawn"][[place for place in heads.find(self.drawn) if place is not None]] = True
        for name in COLUMNS:
            estimates = heads.estimates.get(name)
            frame[name] = heads.values(name)
            frame[f"{name}_low"] = np.full(len(heads), np.nan) if estimates is None else estimates.low
            frame[f"{name}_high"] = np.full(len(heads), np.nan) if estimates is None else estimates.high
            frame[f"{name}_n"] = np.zeros(len(heads), dtype=int) if estimates is None else estimates.n
        return pandas.DataFrame(frame)

    def plot(self) -> "Figure":
        """A matplotlib figure: heat maps layer x head, one for every score that was measured, with letters at aggregate and
        gather heads, and the leading heads as bars. A notebook shows it; for a file, call its savefig."""
        figure = import_module(listed("views")["atlas"]).draw_scores(self)
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
        probe = probe_in_words(self.probe.get("name", "?"), self.probe.get("options", {}))
        return [
            f"Ranking of {display_name(self.provenance.base)}: {len(self.heads):,} heads, by {self.score.replace('_', ' ')}",
            f"{probe}, {self.probe.get('examples', '?')} examples; base accuracy {self.base_accuracy}",
        ]

    def _notes(self, shown: int) -> list[str]:
        left = len(self.heads) - shown
        more = [f"... and {left:,} more heads: see top(k), to_pandas() and plot()"] if left > 0 else []
        also = ["also for: other skills that ablating or grafting the head costs"] if self.skills else []
        return [*more, *(f"{name.replace('_', ' ')}: {LEGEND[name]}" for name in self._shown()), *also]


def _cell(score: Score, name: str) -> str:
    """A score without its interval."""
    estimate = getattr(score, name)
    return "" if estimate is None else f"{estimate.value:+.3f}"


def _png(figure: "Figure") -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()
