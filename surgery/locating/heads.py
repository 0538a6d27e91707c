"""The scores of a ranking's heads as arrays: a Mamba-1 of 7B has half a million channels, and each counts as a head.

Read as a sequence of `Score`s, which are made when they are asked for. What goes through all heads uses the arrays.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np
from pydantic_core import core_schema

from surgery.models.anatomy import Kind
from surgery.records.plan import Start
from surgery.records.record import Record
from surgery.records.site import Site, SiteText
from surgery.statistics import Estimate, Intervals

Role = Literal["gather", "aggregate"]
ScoreName = Literal["splice_loss", "ablation_loss", "attribution"]
SCORES = ("ablation_drop", "ablation_loss", "splice_gain", "splice_loss", "attribution", "answer_mass", "pair_mass")
KINDS: tuple[Kind | None, ...] = (None, "ssm", "attention")
ROLES: tuple[Role | None, ...] = (None, "gather", "aggregate")
REMEMBERED = 16_384  # of more heads, Scores are made anew whenever they are asked for
# What heads are sorted by: the first of these that was measured.
ORDER: tuple[tuple[int, ScoreName], ...] = ((3, "splice_loss"), (2, "attribution"), (1, "ablation_loss"))


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

    def __repr__(self) -> str:
        first = next((name for _, name in ORDER if getattr(self, name) is not None), None)
        ranked_by = [f"{first.replace('_', ' ')} {getattr(self, first)}"] if first else []
        return f"<{', '.join([str(self.site), *([self.role] if self.role else []), *ranked_by])}>"


def gain(score: Score) -> tuple[int, float]:
    """What heads are sorted by: the exact loss that splicing saves; behind those, its attribution where it was not measured;
    behind those, the loss that ablation costs, where nothing can be spliced."""
    for order, name in ORDER:
        if (estimate := getattr(score, name)) is not None:
            return order, estimate.value
    return 0, 0.0


@dataclass(frozen=True, eq=False)
class Heads(Sequence[Score]):
    """Heads in a ranking's order, best place for a graft first. All arrays are (heads,).

    layer, head: where each is. kind, role: numbers in KINDS and ROLES. sign: of its start, 0 where it has none; tau: NaN
    there. estimates: of each score that was measured, its values, both ends of the intervals, and over how many examples they
    are: 0 where that head was not measured.
    """

    layer: np.ndarray
    head: np.ndarray
    kind: np.ndarray
    role: np.ndarray
    sign: np.ndarray
    tau: np.ndarray
    estimates: Mapping[str, Intervals]

    def __post_init__(self) -> None:
        vars(self)["_scores"] = {}

    @classmethod
    def of(cls, scores: "Iterable[Score] | Heads") -> "Heads":
        """From scores of single heads. Raises ValueError for other sites."""
        if isinstance(scores, Heads):
            return scores
        scores = tuple(scores)
        if other := next((score.site for score in scores if len(score.site.heads) != 1), None):
            raise ValueError(f"{other} is not one head")
        starts = [(0, np.nan) if score.start is None else (score.start.sign, score.start.tau) for score in scores]
        estimates = {}
        for name in SCORES:
            column = [getattr(score, name) for score in scores]
            if any(estimate is not None for estimate in column):
                ends = np.array([(np.nan,) * 3 if e is None else (e.value, *e.ci95) for e in column], dtype=float)
                counts = np.array([0 if e is None else e.n for e in column])
                estimates[name] = Intervals(ends[:, 0], ends[:, 1], ends[:, 2], counts)
        heads = cls(
            layer=np.array([score.site.layer for score in scores], dtype=int),
            head=np.array([score.site.heads[0] for score in scores], dtype=int),
            kind=np.array([KINDS.index(score.kind) for score in scores], dtype=np.uint8),
            role=np.array([ROLES.index(score.role) for score in scores], dtype=np.uint8),
            sign=np.array([sign for sign, _ in starts], dtype=np.int8),
            tau=np.array([tau for _, tau in starts], dtype=float),
            estimates=estimates,
        )
        if len(scores) <= REMEMBERED:
            vars(heads)["_scores"] = dict(enumerate(scores))
        return heads

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """In JSON: a list of scores."""
        scores = handler.generate_schema(tuple[Score, ...])

        def validated(given: Any, parse: Any) -> Heads:
            return given if isinstance(given, Heads) else cls.of(parse(given))

        listed = core_schema.plain_serializer_function_ser_schema(tuple, return_schema=scores)
        return core_schema.no_info_wrap_validator_function(validated, scores, serialization=listed)

    def __len__(self) -> int:
        return len(self.layer)

    @overload
    def __getitem__(self, index: int) -> Score: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Score, ...]: ...
    def __getitem__(self, index: int | slice) -> Score | tuple[Score, ...]:
        numbers = range(len(self))[index]
        return self._score(numbers) if isinstance(numbers, int) else tuple(map(self._score, numbers))

    def __iter__(self) -> Iterator[Score]:
        return map(self._score, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Heads | tuple | list):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<scores of {len(self):,} heads>"

    def _score(self, i: int) -> Score:
        scores: dict[int, Score] = vars(self)["_scores"]
        if i in scores:
            return scores[i]
        estimates = {
            name: Estimate(value=float(e.value[i]), ci95=(float(e.low[i]), float(e.high[i])), n=int(e.n[i]))
            for name, e in self.estimates.items()
            if e.n[i]
        }
        score = Score(site=self.site(i), kind=KINDS[self.kind[i]], role=ROLES[self.role[i]], start=self.start(i), **estimates)
        if len(self) <= REMEMBERED:
            scores[i] = score
        return score

    def site(self, i: int) -> Site:
        """Of the head at i."""
        return Site(int(self.layer[i]), (int(self.head[i]),))

    def start(self, i: int) -> Start | None:
        """Of the head at i."""
        return Start(sign=int(self.sign[i]), tau=float(self.tau[i])) if self.sign[i] else None  # type: ignore[arg-type]

    def take(self, numbers: Any) -> "Heads":
        """Some of the heads, in the order given. numbers: an index of arrays."""
        estimates = {name: Intervals(*(part[numbers] for part in e)) for name, e in self.estimates.items()}
        arrays = {field.name: getattr(self, field.name)[numbers] for field in fields(self) if field.name != "estimates"}
        return Heads(**arrays, estimates=estimates)

    def sorted(self) -> "Heads":
        """Best place for a graft first (see gain); of equals the one that stood first."""
        return self.take(self.order())

    def order(self) -> np.ndarray:
        """Where the heads stand, best place for a graft first."""
        level, by = np.zeros(len(self), dtype=int), np.zeros(len(self))
        for order, name in reversed(ORDER):
            measured = self.measured(name)
            level[measured], by[measured] = order, self.values(name)[measured]
        return np.lexsort((-by, -level))

    def measured(self, name: str) -> np.ndarray:
        """(heads,) bool: where a score was measured."""
        return self.estimates[name].n > 0 if name in self.estimates else np.zeros(len(self), dtype=bool)

    def values(self, name: str) -> np.ndarray:
        """(heads,): a score, NaN where it was not measured."""
        return self.estimates[name].value if name in self.estimates else np.full(len(self), np.nan)

    def with_role(self, role: Role | None = None) -> np.ndarray:
        """Where the heads of a role stand (None: of any), those first whose ablation costs most."""
        chosen = np.flatnonzero(self.role if role is None else self.role == ROLES.index(role))
        costs = np.where(self.measured("ablation_loss"), self.values("ablation_loss"), 0.0)[chosen]
        return chosen[np.argsort(-costs, kind="stable")]

    def find(self, sites: Iterable[Site]) -> list[int | None]:
        """Where single heads stand; None for a site that is not among them."""
        numbers, places = self._numbered
        result: list[int | None] = []
        for site in sites:
            number = _number(site.layer, site.heads[0]) if len(site.heads) == 1 else -1
            at = int(np.searchsorted(numbers, number))
            result.append(int(places[at]) if at < len(self) and numbers[at] == number else None)
        return result

    @cached_property
    def _numbered(self) -> tuple[np.ndarray, np.ndarray]:
        """The heads' numbers, sorted, and where each of them is."""
        numbers = _number(self.layer, self.head)
        places = np.argsort(numbers, kind="stable")
        return numbers[places], places


def _number(layer: Any, head: Any) -> Any:
    """One number for both, in the order of the sites."""
    return layer * 2**32 + head
