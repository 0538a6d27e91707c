"""The models of a run before anything was located: its entries, made by the run's own function at a depth that can be tried."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from surgery.evaluation.bench import Entry
from surgery.jobs.costs.sample import Patient, moved
from surgery.jobs.entries import entries_of, names_of
from surgery.locating.heads import Heads, Score
from surgery.locating.ranking import Ranking
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.site import Site
from surgery.splicing.splice import adopt
from surgery.statistics import Estimate, Intervals


@dataclass(frozen=True)
class Trained:
    """A model that is to be tuned: its plan, and of a control the layers whose mixers are trained."""

    model: PreTrainedModel
    plan: Plan
    layers: list[int] | None

    @property
    def first(self) -> int:
        """The first layer that is trained."""
        return min(self.layers or [site.layer for site in self.plan.sites])


@dataclass(frozen=True)
class Models:
    """entries: by name, what is measured. trained: by name, what is tuned."""

    entries: dict[str, Entry]
    trained: dict[str, Trained]


def models_of(patient: Patient, recipe: Recipe, chosen: Plan, depth: int, first: int = 0) -> Models:
    """The models of a run, before they are tuned, in the first `depth` layers of the base. Where these are not all, the first
    graft is in the layer `first`. Grafts that would start from a donor start without it: that changes no cost."""
    base = patient.at(depth)
    plan = bare(chosen) if depth == patient.depth else moved(bare(chosen), depth, first)
    trained: dict[str, Trained] = {}

    def note(name: str, model: PreTrainedModel, plan: Plan, layers: list[int] | None = None) -> PreTrainedModel:
        trained[name] = Trained(model, plan, layers)
        return model

    entries = entries_of(base, _without_donor(recipe), level(depth, patient.heads), plan, None, note)
    entries["base"] = Entry(adopt(base), entries["base"].description)
    return Models(entries, trained)


def all_names(patient: Patient, recipe: Recipe, chosen: Plan) -> list[str]:
    """The names of a run's entries in the whole model: fewer layers may leave no room for some of the controls."""
    return names_of(_without_donor(recipe), level(patient.depth, patient.heads), bare(chosen))


def _without_donor(recipe: Recipe) -> Recipe:
    options = recipe.plan.model_copy(update={"donor": None, "donor_heads": {}, "donor_layers": {}, "mlp": False})
    return recipe.model_copy(update={"plan": options})


def bare(plan: Plan) -> Plan:
    """The plan without a donor."""
    if plan.donor is None:
        return plan
    return Plan(kind=plan.kind, sites=plan.sites, width=plan.width, blend=plan.blend, seed=plan.seed)


def assumed(recipe: Recipe, depth: int, heads: int) -> Plan:
    """The recipe's plan, at its sites, or while it is not known which lead, at the first: where tuning costs most."""
    options = recipe.plan
    if options.sites is not None:
        sites = options.sites
    elif options.kind == "layer":
        sites = tuple(Site(layer) for layer in range(min(options.layers, depth)))
    else:
        sites = tuple(Site(number // heads, (number % heads,)) for number in range(min(options.counted, depth * heads)))
    shared = options.shared and options.donor is None
    start: dict[str, Any] = {} if options.init is None else {"init": options.init}
    blend = options.auto.gates[0] if options.init == "copy" and options.blend is None else options.blend
    return Plan(
        kind=options.kind, sites=sites, width=options.width, blend=blend, shared=shared, seed=recipe.seed, **start
    )  # fmt: skip


@cache
def level(depth: int, heads: int) -> Ranking:
    """A ranking in which all sites are equal. The draws of random sites depend on nothing but which sites there are."""
    count = depth * heads
    nothing = Intervals(np.zeros(count), np.zeros(count), np.zeros(count), np.ones(count, dtype=int))
    every = Heads(
        layer=np.repeat(np.arange(depth), heads), head=np.tile(np.arange(heads), depth), kind=np.zeros(count, np.uint8),
        role=np.zeros(count, np.uint8), sign=np.zeros(count, np.int8), tau=np.full(count, np.nan),
        estimates={"splice_loss": nothing},
    )  # fmt: skip
    loss = Estimate.model_construct(value=0.0, ci95=(0.0, 0.0), n=1)
    layers = tuple(Score.model_construct(site=Site(layer), start=None, splice_loss=loss) for layer in range(depth))
    return Ranking.model_construct(provenance=None, heads=every, layers=layers)
