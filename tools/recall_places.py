"""Does it matter on prose where the attention is? A base that has to recall, novel by novel.

    python -m tools.recall_places FOLDER

FOLDER holds books/ as recipes/names.yaml names it, and takes what is located and tuned; what is there already is not done
again. Heads are located on recall hits of novels that nothing was learnt from, and what is measured are novels by other authors
of whom nothing was read: without those heads and without as many random ones; with grafts at them, at random other heads of
their layers and at random heads of other layers, untrained and tuned; the same tuning without a graft and with adapters alone;
and a cache of n-grams, which is not trained. A novel is a unit. It writes recipes/recall-places.json, from which
tools/fill_pages.py fills docs/evidence/text.md.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from surgery.evaluation.results import HITS
from surgery.evaluation.suites.hits import hit_texts
from surgery.jobs.entries import without_graft
from surgery.jobs.locating_stage import located
from surgery.jobs.opening import open_checkpoint
from surgery.jobs.tuning_stage import tuned
from surgery.loading.opened import Checkpoint
from surgery.locating.planning import plan, random_plan
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.locating.substitution import ablate_heads
from surgery.models.anatomy import anatomy
from surgery.probes.hits import PairCounts
from surgery.records.plan import Plan
from surgery.records.recipe import Lora, Recipe, changed, read_recipe
from surgery.records.record import Environment, Record, Sealed, environment
from surgery.records.site import Site
from surgery.runtime.ownership.files import writing
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt, splice
from surgery.statistics import Estimate, OverDocuments, mean, over_documents, shares
from surgery.tuning.rare_pairs import training_pairs
from surgery.tuning.trainable import with_own_mixers
from tools.copy_cache import ROOT, base_losses, chosen_shares, mixed
from tools.recall import ALL, APART, BASE, CACHED, NOVELS, RARE, kinds, seen_apart

RECORD = ROOT / "recipes" / "recall-places.json"
DRAWS = 3  # of random heads
LOCATED, SAME_LAYER, ELSEWHERE = "located heads", "other heads of their layers", "heads of other layers"
WITHOUT, GRAFTS, TUNED = "without ", "grafts at ", ", tuned"
NO_GRAFT, ADAPTERS = "no graft" + TUNED, "adapters alone" + TUNED
KINDS = (HITS, APART, ALL)


class Change(Record):
    """Against another model, in nats per token: over novels, and in each of them over its rows."""

    over: OverDocuments
    novels: dict[str, Estimate]


class RecallPlaces(Sealed, Environment):
    """located: the heads. scores: of each, what ablating it costs and what a graft gains, in nats. drawn: the random heads.
    loss: of the base, length -> kind -> the mean over novels. change: to the base, model -> length -> kind. beyond: what tuned
    grafts at the located heads change on repeated rare bigrams, against each other model. tokens: length -> kind -> how many in
    all novels."""

    seed: int
    steps: int
    blend: float | None
    located: tuple[str, ...]
    scores: dict[str, dict[str, Estimate | None]]
    drawn: dict[str, tuple[str, ...]]
    shares: dict[str, float]
    tokens: dict[str, dict[str, int]]
    loss: dict[str, dict[str, float]]
    change: dict[str, dict[str, dict[str, OverDocuments]]]
    beyond: dict[str, dict[str, Change]]


@dataclass(frozen=True)
class Model:
    """silent: heads that are ablated while it is measured."""

    model: PreTrainedModel
    silent: tuple[Site, ...] = ()

    @contextmanager
    def as_measured(self) -> Iterator[PreTrainedModel]:
        with ablate_heads(anatomy(self.model), self.silent) if self.silent else nullcontext():
            yield self.model


@dataclass
class Losses:
    """Of the rows of a novel: (rows, t - 1) nats, and which tokens are of a kind."""

    nats: np.ndarray
    chosen: dict[str, np.ndarray]

    def mean(self, kind: str) -> float:
        return float(self.nats[self.chosen[kind]].mean())

    def change(self, before: "Losses", kind: str) -> Estimate:
        """Over rows, each with the weight of its tokens."""
        chosen = self.chosen[kind]
        return mean(shares(((self.nats - before.nats) * chosen).sum(1), chosen.sum(1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, default=ROOT / "checkpoints" / "tiny-names", help="another base")
    options = parser.parse_args()
    recipe = read_recipe(ROOT / "recipes" / "names.yaml", [f"model={options.base.resolve()}"])
    os.chdir(options.folder)  # the recipe names its texts from there
    base = open_checkpoint(recipe)
    out = Path("recall-places")
    with writing(out):
        ranking = located(recipe, base, out, resume=True, figures=False, subject=Subject.of(base))
    chosen = plan(ranking, **recipe.plan.given(), seed=recipe.seed)
    say(f"located: {'; '.join(map(str, chosen.sites))}")
    plans = {LOCATED: [chosen], SAME_LAYER: _drawn(ranking, chosen, True), ELSEWHERE: _drawn(ranking, chosen, False)}
    models = _models(recipe, base, chosen, plans, out)
    weights = chosen_shares(base.model, recipe, base.tokenizer, tuple(recipe.locate.options["source"][:2]))
    counts = training_pairs(base.tokenizer, recipe.data)
    measured = {length: _measured(recipe, base, models, weights, counts, length) for length in recipe.bench.lengths}
    RECORD.write_text(_record(recipe, ranking, plans, weights, measured).text())


def _drawn(ranking: Ranking, chosen: Plan, same_layers: bool) -> list[Plan]:
    drawn = (random_plan(ranking, chosen, seed, same_layers=same_layers) for seed in range(DRAWS))
    return [each for each in drawn if each is not None]


def _models(recipe: Recipe, base: Checkpoint, chosen: Plan, plans: dict[str, list[Plan]], out: Path) -> dict[str, list[Model]]:
    """By name, one for each draw."""
    whole = adopt(base.model)
    models = {BASE: [Model(whole)]}
    for where, drawn in plans.items():
        models[WITHOUT + where] = [Model(whole, tuple(head for site in each.sites for head in site.each())) for each in drawn]
    for where, drawn in plans.items():
        models[GRAFTS + where] = [Model(splice(base.model, each).eval()) for each in drawn]
    lora = changed(recipe, tune={"lora": Lora(target_modules=("in_proj", "out_proj")).model_dump(mode="json")})
    layers = without_graft(chosen)[0]

    def learnt(name: str, model: PreTrainedModel, by: Recipe, at: Plan | None, own: list[int] | None) -> Model:
        tuned(model, base, by, out / name, plan=at, layers=own, teacher=whole, resume=True, description=name)
        return Model(model.eval())

    for where, drawn in plans.items():
        models[GRAFTS + where + TUNED] = [
            learnt(f"{where} {number}", splice(base.model, each), recipe, each, None) for number, each in enumerate(drawn)
        ]
    models[NO_GRAFT] = [learnt("no graft", with_own_mixers(base.model, layers), recipe, None, layers)]
    models[ADAPTERS] = [learnt("adapters", with_own_mixers(base.model, []), lora, None, [])]
    return models


def _measured(
    recipe: Recipe,
    base: Checkpoint,
    models: dict[str, list[Model]],
    weights: dict[int, float],
    counts: PairCounts,
    length: int,
) -> dict[str, dict[str, list[Losses]]]:
    """name -> novel -> the losses, one for each draw."""
    result: dict[str, dict[str, list[Losses]]] = {name: {} for name in (*models, CACHED)}
    bench = recipe.bench.model_copy(update={"contexts": (length,)})
    for novel in NOVELS:
        data = recipe.data.model_copy(update={"held_out_text": f"books/valid/{novel}.txt"})
        text = hit_texts(bench, base.tokenizer, data, recipe.seed)[f"{HITS}.{length}"]
        chosen = kinds(text, seen_apart(text.rows.ids.numpy(), counts, RARE))
        for name, each in models.items():
            result[name][novel] = []
            for one in each:
                with one.as_measured() as model:
                    result[name][novel].append(Losses(base_losses(model, recipe, text), chosen))
        cached = mixed(result[BASE][novel][0].nats, text.rows.ids.numpy(), weights)
        result[CACHED][novel] = [Losses(cached, chosen)]
        told = "; ".join(f"{name} {np.mean([one.mean(HITS) for one in of[novel]]):.3f}" for name, of in result.items())
        say(f"{novel}, rows of {length}: {told}")
    return result


def _record(
    recipe: Recipe, ranking: Ranking, plans: dict[str, list[Plan]], weights: dict[int, float],
    measured: dict[int, dict[str, dict[str, list[Losses]]]],
) -> RecallPlaces:  # fmt: skip
    best = GRAFTS + LOCATED + TUNED

    def changed_to_base(name: str) -> dict[str, dict[str, OverDocuments]]:
        return {
            str(length): {kind: _change(models[name], models[BASE], kind).over for kind in KINDS}
            for length, models in measured.items()
        }

    def beyond(name: str) -> dict[str, Change]:
        return {str(length): _change(models[best], models[name], HITS) for length, models in measured.items()}

    names = list(next(iter(measured.values())))
    heads = [head for site in plans[LOCATED][0].sites for head in site.each()]
    by_head = {score.site: score for score in ranking.heads}
    return RecallPlaces(
        **environment().model_dump(), seed=recipe.seed, steps=int(recipe.tune.steps), blend=recipe.plan.blend,
        located=tuple(map(str, heads)),
        scores={str(head): {"ablation": by_head[head].ablation_loss, "graft": by_head[head].splice_loss} for head in heads},
        drawn={where: tuple("; ".join(map(str, plan.sites)) for plan in drawn) for where, drawn in plans.items()},
        shares={str(order): share for order, share in weights.items()},
        tokens={
            str(length): {kind: sum(int(of[0].chosen[kind].sum()) for of in models[BASE].values()) for kind in KINDS}
            for length, models in measured.items()
        },
        loss={
            str(length): {kind: float(np.mean([of[0].mean(kind) for of in models[BASE].values()])) for kind in KINDS}
            for length, models in measured.items()
        },
        change={name: changed_to_base(name) for name in names if name != BASE},
        beyond={name: beyond(name) for name in names if name != best},
    )  # fmt: skip


def _change(of: dict[str, list[Losses]], before: dict[str, list[Losses]], kind: str) -> Change:
    """Of the mean over draws, which the rows of a novel have in common."""
    novels = {novel: _mean_of(draws).change(_mean_of(before[novel]), kind) for novel, draws in of.items()}
    return Change(over=over_documents(np.array([each.value for each in novels.values()])), novels=novels)


def _mean_of(draws: list[Losses]) -> Losses:
    return Losses(np.mean([each.nats for each in draws], 0), draws[0].chosen)


if __name__ == "__main__":
    main()
