"""The models of a run before anything was located: its entries as the run makes them, and of a deep model its first layers."""

import copy
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from surgery.evaluation.bench import Entry
from surgery.families import family_of
from surgery.jobs.entries import entries_of
from surgery.loading.opened import model_of
from surgery.locating.heads import Heads, Score
from surgery.locating.ranking import Ranking
from surgery.records.plan import Plan, PlanWindows
from surgery.records.recipe import Recipe
from surgery.records.site import Site
from surgery.splicing.splice import share
from surgery.splicing.windows import attention_groups
from surgery.statistics import Estimate, Intervals
from surgery.tuning.trainable import trainable


@dataclass(frozen=True)
class Trained:
    """A model that is tuned. first: the lowest layer that is trained. numbers: how many are trained, adapters apart."""

    first: int
    numbers: int


def models_of(base: PreTrainedModel, recipe: Recipe, chosen: Plan) -> tuple[dict[str, Entry], dict[str, Trained]]:
    """(by name what is measured, by name what is tuned). Grafts that would start from a donor start without it: that changes no
    cost."""
    tuned: dict[str, Trained] = {}

    def note(name: str, model: PreTrainedModel, plan: Plan, layers: list[int] | None = None) -> PreTrainedModel:
        numbers = sum(p.numel() for p in trainable(model, layers).values())
        tuned[name] = Trained(min(layers or [site.layer for site in plan.sites], default=0), numbers)
        return model

    options = recipe.plan.model_copy(update={"donor": None, "donor_layers": {}, "mlp": False})
    without_donor = recipe.model_copy(update={"plan": options})
    depth, heads = family_of(base.config).shape(base.config)
    return entries_of(base, without_donor, uniform_ranking(depth, heads), chosen, None, note), tuned


def assumed(recipe: Recipe, base: PreTrainedModel) -> Plan:
    """The recipe's plan, at its sites, or while it is not known which lead, at the first: where tuning costs most. Windows
    cost what attention costs, and are left out beside grafts."""
    options, (depth, heads) = recipe.plan, family_of(base.config).shape(base.config)
    if options.kind == "window":
        assert options.window is not None
        sites = options.window.sites or tuple(attention_groups(base)[:1])
        return Plan(kind="window", windows=PlanWindows(sites=sites, first=options.window.first, length=options.window.length))
    if options.sites is not None:
        sites = options.sites
    elif options.kind == "layer":
        sites = tuple(Site(layer) for layer in range(min(options.layers, depth)))
    else:
        sites = tuple(Site(number // heads, (number % heads,)) for number in range(min(options.counted, depth * heads)))
    start: dict[str, Any] = {} if options.init is None else {"init": options.init}
    blend = options.auto.gates[0] if options.init == "copy" and options.blend is None else options.blend
    return Plan(
        kind=options.kind, sites=sites, width=options.width, blend=blend, shared=options.shared, seed=recipe.seed, **start
    )  # fmt: skip


@cache
def uniform_ranking(depth: int, heads: int) -> Ranking:
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


def truncate_layers(model: PreTrainedModel, depth: int) -> PreTrainedModel:
    """The first layers of a model without grafts, with its embeddings and its head; all tensors are the model's own."""
    config = copy.deepcopy(model.config)
    for name in ("num_hidden_layers", "num_blocks"):  # as xLSTM has it as well
        if hasattr(config, name):
            setattr(config, name, depth)
    if isinstance(getattr(config, "layer_types", None), list):
        with suppress(AttributeError):  # of some configurations it follows from others
            config.layer_types = config.layer_types[:depth]
    shallow = family_of(config).empty(config, None)
    share(model, shallow, "the base lacks the tensor '{}'")
    return shallow.eval()


def remap_layers(plan: Plan, depth: int) -> Plan:
    """The plan in a model of fewer layers: its layers, in their order, are the first. Where there are not enough, the last
    takes the rest."""
    layers = sorted({site.layer for site in plan.sites})
    heads: dict[int, set[int]] = {}
    for site in plan.sites:
        heads.setdefault(min(layers.index(site.layer), depth - 1), set()).update(site.heads)
    sites = tuple(Site(layer, tuple(sorted(chosen))) for layer, chosen in sorted(heads.items()))
    return plan.model_copy(update={"sites": sites, "starts": {}, "provenance": None})


def held_beyond(entries: Iterable[Entry], base: PreTrainedModel) -> int:
    """The bytes that models hold together and the base does not."""
    own = set(storages([base]))
    return sum(size for place, size in storages(model_of(e.model, "bench") for e in entries).items() if place not in own)


def weights_of(model: PreTrainedModel) -> int:
    """The bytes of a model's weights, tied ones once."""
    return sum(storages([model]).values())


def storages(models: Iterable[PreTrainedModel]) -> dict[int, int]:
    """The bytes of what models hold, by address."""
    tensors: list[torch.Tensor] = [t for model in models for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
