"""Roles: which heads gather, which aggregate (arXiv 2504.18574), told by where in the text a head is needed.

A head is ablated (ablation.py) at some positions only: at the query (the prompt's last token, and those of an answer behind
it), at the ends of the spans of evidence, at the end of the span that holds the answer, elsewhere, everywhere. It is *needed*
at a place if its ablation there costs at least COST nats a question, and the interval of this mean, corrected for the number
of units that were tested, lies above 0.

aggregate: needed at the query. gather: needed at the ends of spans, and what its ablation there costs passes through the units
that aggregate: where they are silent at the query, it costs less than half of it. Both, if both hold. none: neither, or needed
elsewhere about as much, as what every token needs. A model that does not answer above chance, or answers as well when its
records are out of order, has no roles.

Heads can stand in for each other: each alone is not needed, and all together are. So all heads of a layer are ablated together
as well, and a role can be a group's: a pair's, where some pair explains the layer, or the layer's. Layers can stand in for each
other, too, as backup heads do (arXiv 2211.00593): those that are needed where the units that aggregate are silent aggregate as
one group, and its cost at the query is the one beside theirs. A layer's convolution is a candidate for gathering too.

What is measured where: the query is a single token of a question, so it is measured on all questions (QueryReplay). The other
places cost the layers from the head's on, and are measured on some of the questions. Heads that lead the ranking are measured
and heads of the layers that are needed as a whole, since a gather head may have no slope at all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch

from surgery.evaluation.statistics import LEVEL, estimate
from surgery.locating.ablation import Unit, ablated, convolutions
from surgery.locating.replay import QueryReplay, Replay
from surgery.models.anatomy import anatomy
from surgery.probes.encoded import Encoded
from surgery.probes.scoring import logits_at_points
from surgery.records.ranking import Circuit, Edge, GroupScore, Roles
from surgery.records.site import Site
from surgery.runtime.progress import bar

COST = 0.1  # nats a question: what costs less means little, though it can be beyond chance
HALF = 0.5  # of a cost: what has to pass through aggregate units; what a group's members must not explain
OF_LAYER = 16  # units of a needed layer that are measured, beside those that lead
OTHERS = 48  # such units of all layers, those of the layers that are needed most
DEEP, SCREENED = 8, 4  # in a model of more layers, one question of so many tells which units may be needed at a place
PAIRED = 4  # members of a layer whose pairs are tried
NAMED = 4  # units of either role that a sentence names
EDGES = 3  # units of either role between which edges are measured
PLACES = ("everywhere", "evidence", "spans", "elsewhere")
ENDS = ("evidence", "spans")  # where a unit may gather: at the end of the record that holds the answer, or of all
Role = Literal["gather", "aggregate", "both", "none"]


@dataclass(eq=False)
class Costs:
    """What ablating some units together costs, in nats. at: place -> (questions,), or (chosen questions,). roles: which it may
    have; a group has only the role in which its members stand in for each other."""

    units: tuple[Unit, ...]
    name: str
    roles: tuple[Role, ...] = ("gather", "aggregate")
    at: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def layer(self) -> int:
        return self.units[0].layer

    @property
    def end(self) -> str:
        """Which of ENDS it is needed at most."""
        return max(ENDS, key=self.mean)

    def mean(self, *places: str) -> float:
        """The largest mean cost among places, 0 where none was measured."""
        return max((float(self.at[place].mean()) for place in places if place in self.at), default=0.0)


class Ablator:
    """Ablates units of one model on one set of questions. chosen: the questions on which all places are measured."""

    def __init__(self, model: Any, encoded: Encoded, chosen: Sequence[int], batch_size: int):
        self.model, self.encoded, self.batch_size, self.chosen = model, encoded, batch_size, list(chosen)
        self.anatomy = anatomy(model)
        batches = encoded.part(self.chosen).batches(batch_size)
        self.replays = [(at, Replay(model, self.anatomy.blocks, batch)) for at, batch in batches]
        self.last = max(place.layer for place in self.anatomy.mixers)
        self.known: dict[frozenset[tuple[str, str]], tuple[np.ndarray, np.ndarray]] = {}  # unit and place -> what run found
        guess = torch.cat([batch.encoded.choices.double().log() - batch.loss for _, batch in self.replays])
        self.guess = float(guess.mean()) if bool((encoded.choices > 1).all()) else np.inf  # what guessing costs, in nats

    def run(self, *edits: tuple[Costs, str]) -> tuple[np.ndarray, np.ndarray]:
        """(chosen,): by how many nats the loss rises where units are ablated, each at its place, and who is right then."""
        parts = [(unit, place) for costs, place in edits for unit in costs.units]
        # Behind the last mixer nothing but the query is looked at. A convolution is before its mixer.
        parts = [(unit, place) for unit, place in parts if not unit.heads or unit.layer < self.last or place == "query"]
        key = frozenset((unit.name, place) for unit, place in parts)
        if key in self.known:
            return self.known[key]
        rise, right = np.zeros(len(self.chosen)), np.zeros(len(self.chosen), dtype=bool)
        for at, replay in self.replays:
            loss, correct = replay.loss, replay.correct
            if parts:
                with ablated([(unit, replay.mask(place)) for unit, place in parts]):
                    loss, correct = replay.run(min(unit.layer for unit, _ in parts))
            rise[at], right[at] = loss - replay.loss, correct
        self.known[key] = rise, right
        return rise, right

    def at_query(self, costs: Iterable[Costs]) -> None:
        """Measure the query, on all questions. On the chosen ones where a cache is of no use: for convolutions, which wrote
        what it holds, and for attention-free models outside our families, for which transformers returns none."""
        new = [each for each in costs if "query" not in each.at]
        cached = [each for each in new if all(unit.heads for unit in each.units)]
        try:
            for at, batch in self.encoded.batches(self.batch_size, one_length=True) if cached else ():
                replay = QueryReplay(self.model, batch)
                for each in bar(cached, f"roles: the query, {len(at)} of {len(self.encoded)} questions"):
                    with ablated([(unit, replay.mask) for unit in each.units]):
                        costs_at = each.at.setdefault("query", np.zeros(len(self.encoded)))
                        costs_at[at] = replay.losses() - replay.loss
        except ValueError:
            cached = []
        for each in new:
            if each not in cached:
                each.at["query"] = self.run((each, "query"))[0]

    def silencer(self) -> Callable[[Sequence[Costs]], float]:
        """For a search: the mean cost of silencing units at the query, at most that of a guess, on the chosen questions."""
        batches = self.encoded.part(self.chosen).batches(self.batch_size, one_length=True)
        try:
            replays = [QueryReplay(self.model, batch) for _, batch in batches]
        except ValueError:
            return lambda costs: min(float(self.run(*((each, "query") for each in costs))[0].mean()), self.guess)

        def cost(costs: Sequence[Costs]) -> float:
            rises = []
            for replay in replays:
                with ablated([(unit, replay.mask) for each in costs for unit in each.units]):
                    rises.append(replay.losses() - replay.loss)
            return min(torch.cat(rises).mean().item(), self.guess)

        return cost

    def at_places(self, costs: Iterable[Costs], places: Sequence[str] = PLACES) -> None:
        """Measure other places, on the chosen questions. For the heads of the last layer everywhere is the query."""
        for each in bar(list(costs), f"roles: {' and '.join(places[:2])}"):
            last = each.layer == self.last and all(unit.heads for unit in each.units)
            for place in (place for place in places if place not in each.at):
                asked = "query" if place == "everywhere" and last else place
                each.at[place] = self.run((each, asked))[0]


@dataclass
class Found:
    """roles: by name of a unit. circuit: who gathers, who aggregates."""

    roles: dict[str, Roles]
    groups: tuple[GroupScore, ...]
    circuit: Circuit | None


def find_roles(
    model: Any, encoded: Encoded, leading: Sequence[Unit], others: Sequence[Unit], chosen: Sequence[int], batch_size: int
) -> Found:
    """Roles of the leading units, and of other units (best first) in layers that are needed. model: adopted."""
    ablator = Ablator(model, encoded, chosen, batch_size)
    if wrong := why_none(ablator):
        return Found({}, (), Circuit(gather=(), aggregate=(), edges=(), sentence=wrong))
    lead = [Costs((unit,), unit.name) for unit in leading]
    layers = whole_layers(ablator)
    convs = [Costs((unit,), unit.name, ("gather",)) for unit in convolutions(ablator.anatomy)]
    few = ablator if len(layers) <= DEEP else Ablator(model, encoded, chosen[::SCREENED], batch_size)
    ablator.at_query([*lead, *layers])

    def screen(costs: Sequence[Costs], places: Sequence[str]) -> None:
        """Measure places. In a deep model what is not needed at the ends of all records is not asked for at the end of one."""
        if few is not ablator and "spans" in places:
            few.at_places(costs, ("spans",))
            costs = [each for each in costs if each.mean("spans") >= COST / 2]
        few.at_places(costs, places)

    screen([*layers, *convs], ENDS)
    rest: list[Costs] = []
    for layer in sorted(layers, key=lambda layer: -layer.mean("query", *ENDS)):
        mine = [Costs((unit,), unit.name) for unit in others if unit.place == layer.units[0].place]
        mine = mine[: min(OF_LAYER, OTHERS - len(rest))]
        if layer.mean("query") >= COST:
            ablator.at_query(mine)
        if ends := [place for place in ENDS if layer.mean(place) >= COST]:
            screen(mine, ends)
        rest += mine if layer.mean("query", *ENDS) >= COST else []
    few.at_places(lead)
    tested = [*lead, *rest, *convs, *layers]
    heads = [*lead, *(each for each in rest if each.mean("query", *ENDS) >= COST)]
    convs = [each for each in convs if each.mean(*ENDS) >= COST]
    found = [group for place in ("query", *ENDS) for group in find_groups(ablator, few, layers, [*lead, *rest], place)]
    groups = [*convs, *merge_groups(found)]
    ablator.at_query([*heads, *groups])
    for each in [*heads, *groups] if few is not ablator else ():  # what may be needed is measured again, on all questions
        if each.mean("query", *PLACES) >= COST:
            each.at = {"query": each.at["query"]}
    few.at_places([*heads, *groups], ("everywhere",))  # is shown; no role rests on it
    ablator.at_places([*heads, *groups])
    return name_roles(ablator, heads, groups, layers, len(tested))


def whole_layers(ablator: Ablator) -> list[Costs]:
    """All heads of every mixer together, named by the layer, and by the kind where a layer has several."""
    costs = []
    for place in ablator.anatomy.mixers:
        unit = Unit(place, tuple(range(place.first, place.first + place.heads)))
        several = len(ablator.anatomy.mixers_of(place.layer)) > 1
        costs.append(Costs((unit,), f"L{place.layer}" + f" {place.kind}" * several))
    return costs


def find_groups(ablator: Ablator, few: Ablator, layers: Sequence[Costs], members: Sequence[Costs], place: str) -> list[Costs]:
    """The layers that are needed at a place more than their members explain, each as its pair that does, or as a whole. few:
    the same on the questions on which places other than the query are screened."""
    groups = list[Costs]()
    roles: tuple[Role, ...] = ("aggregate",) if place == "query" else ("gather",)
    for layer in layers:
        own = sorted((m for m in members if m.units[0].place == layer.units[0].place), key=lambda m: -m.mean(place))
        if layer.mean(place) < COST or sum(max(m.mean(place), 0) for m in own) >= HALF * layer.mean(place):
            continue
        pairs = [Costs((*a.units, *b.units), f"{a.name} + {b.name}", roles) for a, b in combinations(own[:PAIRED], 2)]
        ablator.at_query(pairs) if place == "query" else few.at_places(pairs, (place,))
        best = max(pairs, key=lambda pair: pair.mean(place), default=layer)
        whole = Costs(layer.units, layer.name, roles, dict(layer.at))
        groups.append(best if best.mean(place) >= HALF * layer.mean(place) else whole)
    return groups


def merge_groups(groups: Sequence[Costs]) -> list[Costs]:
    """Groups that were found at several places, once each."""
    merged: dict[str, Costs] = {}
    for each in groups:
        if (known := merged.setdefault(each.name, each)) is not each:
            known.roles, known.at = (*known.roles, *each.roles), {**each.at, **known.at}
    return list(merged.values())


def find_stand_ins(ablator: Ablator, aggregate: Sequence[Costs], layers: Sequence[Costs], tests: int) -> list[Costs]:
    """The layers that are needed at the query where the aggregate units are silent, as one group: as few of all layers as
    together cost what all cost, or a guess. Nothing where the aggregate units cost that much."""
    cost, left, chosen, general = ablator.silencer(), list(layers), list[Costs](), list[Costs]()
    if cost(aggregate) >= cost([*aggregate, *left]) - COST:
        return []
    while not chosen or general:
        chosen = left = [layer for layer in left if layer not in general]
        enough = cost([*aggregate, *left]) - COST
        for layer in bar(left, "roles: layers that stand in for each other"):
            rest = [each for each in chosen if each is not layer]
            chosen = rest if cost([*aggregate, *rest]) >= enough else chosen
        if not chosen:
            return []
        ablator.at_places(chosen, ("spans", "elsewhere"))
        general = [layer for layer in chosen if is_general(ablator, layer, tests)]
    group = Costs(
        tuple(unit for layer in chosen for unit in layer.units), " + ".join(each.name for each in chosen), ("aggregate",)
    )
    before = tuple(unit for each in aggregate for unit in each.units)
    alone, both = Costs(before, "what aggregates"), Costs((*before, *group.units), "with what stands in")
    ablator.at_query([alone, both])
    group.at["query"] = both.at["query"] - alone.at["query"]
    return [group] if is_needed(group.at["query"], tests) else []


def name_roles(ablator: Ablator, heads: Sequence[Costs], groups: Sequence[Costs], layers: Sequence[Costs], tests: int) -> Found:
    """Roles by the definitions of this module, from what was measured."""
    ranked = sorted((*heads, *groups), key=lambda each: -each.mean("query", *ENDS))
    units = [each for each in ranked if not is_general(ablator, each, tests)]
    aggregate = [each for each in units if "aggregate" in each.roles and is_needed(each.at["query"], tests)]
    stand_ins = find_stand_ins(ablator, aggregate, layers, tests)
    ablator.at_places(stand_ins)
    groups = [each for each in groups if each.name not in {other.name for other in stand_ins}]
    aggregate, groups = [*aggregate, *stand_ins], [*groups, *stand_ins]
    gather = [each for each in units if "gather" in each.roles and gathers(ablator, each, aggregate, tests)]

    def measured(each: Costs) -> Roles:
        one, other = each in gather, each in aggregate
        role: Role = "both" if one and other else "gather" if one else "aggregate" if other else "none"
        costs = {place: estimate(each.at[place], decisions=False, level=LEVEL / tests) for place in ("query", *PLACES)}
        return Roles(role=role, **costs)

    return Found(
        roles={each.name: measured(each) for each in heads},
        groups=tuple(
            GroupScore(name=each.name, sites=tuple(Site(unit.layer, unit.heads) for unit in each.units), roles=measured(each))
            for each in groups
        ),
        circuit=Circuit(
            gather=tuple(each.name for each in gather),
            aggregate=tuple(each.name for each in aggregate),
            edges=measure_edges(ablator, gather, aggregate),
            sentence=describe_circuit(ablator, gather, aggregate),
        ),
    )


def why_none(ablator: Ablator) -> str:
    """Why no head of the model can have a role, as a sentence; nothing if it answers above chance, by its records."""
    right = np.concatenate([replay.correct for _, replay in ablator.replays]).astype(float)
    choices = ablator.encoded.choices.double()
    chance = float((1 / choices).masked_fill(choices == 1, 0.0).mean())
    if len(right) < 2 or estimate(right).low <= chance:
        return "The model answers no better than chance, so no head has a role."
    loss = np.zeros(len(ablator.chosen))
    with torch.no_grad():
        for at, replay in ablator.replays:
            logits = logits_at_points(ablator.model, replay.encoded.out_of_order())
            loss[at] = replay.encoded.loss(logits).double().cpu() - replay.loss
    if not is_needed(loss, 1):
        return "The model answers as well when the records are out of order, so it knows the answers and no head has a role."
    return ""


def is_needed(values: np.ndarray, tests: int) -> bool:
    """Whether costs (questions,) show that a unit is needed, one of `tests` that were tested."""
    if len(values) < 2 or values.mean() < COST:
        return False
    return estimate(values, decisions=False, level=LEVEL / tests).low > 0


def is_general(ablator: Ablator, costs: Costs, tests: int) -> bool:
    """Whether a unit is needed elsewhere about as much as where retrieval takes place, or costs there what a guess does."""
    most = min(costs.mean("query", *ENDS), ablator.guess)
    return costs.mean("elsewhere") >= HALF * most and is_needed(costs.at["elsewhere"], tests)


def gathers(ablator: Ablator, costs: Costs, aggregate: Sequence[Costs], tests: int) -> bool:
    """Whether a unit is needed at the ends of spans, and this need passes through the aggregate units behind it."""
    behind = [(other, "query") for other in aggregate if comes_before(costs, other)]
    if not behind or not is_needed(costs.at[costs.end], tests):
        return False
    through = passing(ablator, (costs, costs.end), behind)
    return is_needed(through, 1) and through.mean() >= HALF * costs.mean(*ENDS)


def passing(ablator: Ablator, source: tuple[Costs, str], silent: Sequence[tuple[Costs, str]]) -> np.ndarray:
    """(chosen,): how much less it costs to ablate the source where others are silent."""
    costs, place = source
    return costs.at[place] + ablator.run(*silent)[0] - ablator.run(source, *silent)[0]


def comes_before(one: Costs, other: Costs) -> bool:
    """Whether what one unit writes is read by another at later tokens: a convolution is before the heads of its layer."""
    last = max(unit.layer for unit in other.units)
    return one.layer < last or (one.layer == last and not one.units[0].heads and bool(other.units[0].heads))


def measure_edges(ablator: Ablator, gather: Sequence[Costs], aggregate: Sequence[Costs]) -> tuple[Edge, ...]:
    """How much of each gather unit's cost passes through each single aggregate unit, for those that cost most."""
    edges = []
    for one in sorted(gather, key=lambda each: -each.mean(*ENDS))[:EDGES]:
        for other in sorted(aggregate, key=lambda each: -each.mean("query"))[:EDGES]:
            if one is not other and comes_before(one, other):
                through = passing(ablator, (one, one.end), [(other, "query")])
                edges.append(Edge(source=one.name, target=other.name, share=float(through.mean() / one.mean(*ENDS))))
    return tuple(edges)


def describe_circuit(ablator: Ablator, gather: Sequence[Costs], aggregate: Sequence[Costs]) -> str:
    """One sentence: who gathers, who aggregates, and what is left without them."""
    if not aggregate:
        return "Nothing that was ablated at the query by itself is needed beyond chance, so nothing has a role."

    def accuracy(*edits: tuple[Costs, str]) -> str:
        return f"{ablator.run(*edits)[1].mean():.2f}"

    def listed(units: Sequence[Costs], verb: str) -> str:
        names = [each.name for each in units][: NAMED if len(units) > NAMED + 1 else None]
        names += [f"{len(units) - len(names)} more"] if len(names) < len(units) else []
        return f"{', '.join(names[:-1])} and {names[-1]} {verb}" if len(names) > 1 else f"{names[0]} {verb}s"

    found = f"{listed(aggregate, 'aggregate')} at the query"
    them = "them" if len(aggregate) > 1 else "it"
    left = f"accuracy is {accuracy()}, without {them} there {accuracy(*((each, 'query') for each in aggregate))}"
    if not gather:
        return f"{found}, and nothing was found to gather; {left}."
    places = [(each, each.end) for each in gather]
    return f"{listed(gather, 'gather')} at the ends of records; {found}; {left}, without what gathers {accuracy(*places)}."
