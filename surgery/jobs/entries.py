"""The models that a run measures: the base, the hybrid before and after tuning, and the controls that stand beside them."""

import sys
from collections.abc import Callable

from transformers import PreTrainedModel

from surgery.evaluation.entries import Entry
from surgery.locating.planning import random_plan
from surgery.locating.ranking import Ranking
from surgery.probes.knowledge import PARTS, Knowledge
from surgery.records.names import CONTROL_TUNED
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.splicing.splice import splice
from surgery.splicing.windows import random_windows
from surgery.tuning.trainable import with_own_mixers

# Tunes a model in place and returns it: (its name, the model, its plan, of a control the layers whose mixers are tuned).
Tune = Callable[..., PreTrainedModel]
STARTS = {
    "donor": "a donor's", "dual": "the heads' own", "induction": "an induction head's", "random": "random",
}  # fmt: skip
SAME = "tuned on the same data for the same steps"


def entries_of(
    base: PreTrainedModel, recipe: Recipe, ranking: Ranking, chosen: Plan,
    open_donor: Callable[[], PreTrainedModel | None] | None, tune: Tune,
) -> dict[str, Entry]:  # fmt: skip
    """By name, the base first. Each holds its grafts, or the mixers that it trains, and shares all else with the base.

    open_donor: opens the model that grafts start from. It is let go before the first of them is tuned."""
    entries = _untuned(base, recipe, ranking, chosen, open_donor() if open_donor else None)
    graftless = _graftless(recipe, chosen)
    for name, entry in entries.items():
        if name in graftless:
            tune(name, entry.model, chosen, graftless[name][0])
        elif name.endswith("tuned"):
            tune(name, entry.model, entry.plan)
    return entries


def _untuned(
    base: PreTrainedModel, recipe: Recipe, ranking: Ranking, chosen: Plan, donor: PreTrainedModel | None
) -> dict[str, Entry]:
    """All of them as they are before tuning."""

    def spliced(description: str, at: Plan) -> Entry:
        return Entry(splice(base, at, donor), description, at)

    entries = {
        "base": Entry(base, "the pretrained model, unchanged"),
        "spliced": spliced(f"{_begins(chosen)}, no training", chosen),
        "tuned": spliced(f"the same, {_tuned_parts(chosen)} tuned{_division(recipe)}", chosen),
    }  # fmt: skip
    for name, (layers, description) in _graftless(recipe, chosen).items():
        entries[name] = Entry(with_own_mixers(base, layers), description)
    others = _elsewhere(recipe, ranking, chosen) | _other_windows(base, recipe, chosen)
    return entries | {name: spliced(*how) for name, how in others.items()}


def _begins(chosen: Plan) -> str:
    windows = [f"windows for {'some ' * bool(chosen.sites)}heads of the model's own attention"] if chosen.windows else []
    grafts = [f"attention spliced in, initialised from {STARTS.get(chosen.init)} weights"] if chosen.sites else []
    if chosen.init == "copy":
        grafts = ["a copy mechanism added to the layers, beside all of their heads"]
    return ", and ".join(grafts + windows)


def _tuned_parts(chosen: Plan) -> str:
    return "its grafts" if chosen.sites else "its adapters"


def _graftless(recipe: Recipe, chosen: Plan) -> dict[str, tuple[list[int], str]]:
    """The controls without a graft, by name: (the layers whose mixers are tuned, description). With tune.lora all of them have
    its adapters, as the hybrids do."""
    if not recipe.bench.has("tuned"):
        return {}
    controls = {CONTROL_TUNED: without_graft(chosen)} if chosen.sites else {}
    if recipe.tune.lora is not None:
        without = "no graft" if chosen.sites else "no window"
        controls["control_lora_tuned"] = [], f"{without}: only the adapters of tune.lora, {SAME}"
    return controls


def without_graft(chosen: Plan) -> tuple[list[int], str]:
    """The cheapest control of a plan: (the layers whose mixers are tuned, description)."""
    layers = [site.layer for site in chosen.sites]
    return layers, f"no graft: the base's own mixer of {', '.join(f'L{layer}' for layer in layers)} {SAME}"


def _elsewhere(recipe: Recipe, ranking: Ranking, chosen: Plan) -> dict[str, tuple[str, Plan]]:
    """Hybrids with other plans than the chosen one, by name: (description, plan)."""
    plans: dict[str, tuple[str, Plan]] = {}
    if not chosen.sites:
        return plans
    if recipe.bench.has("random_site"):
        for i in range(recipe.bench.random_sites):
            if elsewhere := random_plan(ranking, chosen, recipe.seed + i):
                name = "control_random_site" + (f"_{i + 1}" if i else "")
                plans[name] = "the graft at random heads of other layers, no training", elsewhere
                if i == 0:
                    plans[f"{name}_tuned"] = "the same, its grafts tuned", elsewhere
    # Heads that copy are the same at every head of a layer.
    same_layer = recipe.bench.has("same_layer") and chosen.init != "copy"
    if same_layer and (beside := random_plan(ranking, chosen, recipe.seed, same_layers=True)):
        name, description = "control_same_layer", "the graft at random other heads of the same layer, no training"
        plans[name] = description, beside
        plans[f"{name}_tuned"] = "the same, its grafts tuned", beside
    return plans


def _other_windows(base: PreTrainedModel, recipe: Recipe, chosen: Plan) -> dict[str, tuple[str, Plan]]:
    """Likewise with windows at other heads of the model's own attention."""
    other = random_windows(base, chosen, recipe.seed) if recipe.bench.has("random_site") else None
    if other is None:
        return {}
    description = "windows for as many random groups of attention heads, no training"
    return {
        "control_random_windows": (description, other),
        "control_random_windows_tuned": (f"the same, {_tuned_parts(chosen)} tuned", other),
    }


def _division(recipe: Recipe) -> str:
    """How a file's facts were divided between tuning, which watched over them, and bench."""
    if recipe.tune.early_stopping is None or recipe.data.facts == "world":
        return ""
    kept, measured = (len(Knowledge(recipe.data.facts, part).questions(sys.maxsize, seed=0)) for part in PARTS)
    return f"; tune.early_stopping asked {kept} of the {kept + measured} facts, bench the other {measured}"
