"""Retrieval-aware conversion (arXiv 2602.11374): of a Transformer's heads, how many have to stay attention?

The recipe's model is a Transformer whose layers were converted into Mamba-2 mixers one by one (surgery/pretraining). The
Transformer's own heads are ranked by what ablating them costs. In the layers of the first n, the converted mixer gets heads of
attention, as many numbers wide as those, and every mixer goes on learning what the Transformer's attention does in its layer.
No layer learns from another's errors until then. In the end all mixers are distilled from the Transformer together, by the
recipe's `tune`. In such a conversion only the layer of a head has a counterpart: a layer's mixer learns as a whole, and which
of its heads are attention is no matter.

The other way to a hybrid of as many heads is to edit the conversion that keeps none: its own ranking by splice
attribution, dual grafts, and the same tuning, which asks nothing of the Transformer.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.evaluation.bench import measure
from surgery.evaluation.results import ModelReport, value
from surgery.figures import plotting
from surgery.figures.plots import name_lines
from surgery.jobs.locating_stage import located
from surgery.jobs.tuning_stage import tuned
from surgery.loading.digests import fingerprint, model_digest
from surgery.loading.opened import Checkpoint
from surgery.locating.planning import plan
from surgery.models.anatomy import mixer_at
from surgery.pretraining.layer_alignment import align_layers
from surgery.pretraining.lessons import batches_of_all_kinds
from surgery.pretraining.recipe import PretrainRecipe, read_pretrain_recipe
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.sections.section import FACTOR, Steps
from surgery.records.site import Site
from surgery.runtime.ownership.files import put
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt, splice, unsplice
from surgery.statistics import Estimate, Proportion
from surgery.studies.figures import LINES
from surgery.studies.study import Findings, Measurements, Row, Study, Subjects
from surgery.tuning.trainable import own_mixers, with_own_mixers

TRANSFORMER, CONVERTED, NONE = "the Transformer", "converted", "no head kept"
KEPT, RANDOM, OPERATED = "kept", "at random", "operated on"
CURVES = {
    KEPT: "the Transformer's retrieval\nheads kept",
    RANDOM: "heads kept in random layers",
    OPERATED: "grafted by splice attribution,\nand tuned",
}
COLORS = ("#0072B2", "#009E73", "#CC79A7")  # in the order of CURVES


class RetrievalAware(Study):
    """other: the Transformer. heads: how many of its heads stay attention. steps, learning_rate: of each mixer, which goes on
    from where the conversion ended, on the data of the conversion's recipe (recipe.yaml in the model's folder). The recipe's
    `locate` ranks both models, its `tune` distils the mixers of what is converted and tunes the grafts of what is edited,
    its `bench` says what is measured."""

    title: ClassVar[str] = "Retrieval against heads that stay attention"

    other: str
    heads: tuple[int, ...] = Field(default=(1, 2, 3, 4), min_length=1)
    steps: Steps = 200
    learning_rate: float = Field(default=1e-3, gt=0, le=FACTOR, allow_inf_nan=False)

    def check(self, recipe: Recipe) -> None:
        _conversion(recipe.model, recipe.seed)

    def measure(self, subjects: Subjects) -> Measurements:
        assert subjects.other is not None
        base, teacher, recipe, out = subjects.checkpoint, subjects.other, subjects.recipe, subjects.out
        ranking = located(recipe, teacher, out / "transformer", resume=subjects.resume, figures=False)
        aligned = Aligned(self, subjects, _share(len(ranking.heads), len(subjects.subject.anatomy.coordinates[0])))
        none = aligned.distilled([], NONE)
        operable = _checkpoint(none, base)
        own = located(recipe, operable, out / "converted", resume=subjects.resume, figures=False)
        most, each = max(self.heads), aligned.each
        chosen = [score.site for score in ranking.columns.sorted()[:most]]
        others = sorted({score.site for score in ranking.heads} - {*chosen})
        drawn = random.Random(f"retrieval-aware {recipe.seed}").sample(others, min(most, len(others)))
        models: dict[str, PreTrainedModel] = {CONVERTED: base.model, TRANSFORMER: teacher.model, NONE: operable.model}
        for count in self.heads:
            for curve, heads in ((KEPT, chosen), (RANDOM, drawn)):
                models[_row(curve, count)] = aligned.distilled(heads[:count], _row(curve, count))
            hybrid_plan = plan(own, heads=count * each, seed=recipe.seed)
            hybrid = models[_row(OPERATED, count)] = splice(operable.model, hybrid_plan)
            tuned(
                hybrid, operable, recipe, out / "tuning" / _file(_row(OPERATED, count)), plan=hybrid_plan,
                teacher=adopt(operable.model), resume=subjects.resume, description=_row(OPERATED, count),
            )  # fmt: skip
        reports = measure(models, base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=out / "cells")
        rows = tuple(Row(what=name, figures=_figures(report)) for name, report in reports.items())
        return Measurements(
            about={
                "chosen": [str(site) for site in chosen], "random": [str(site) for site in drawn],
                "operated": [str(score.site) for score in own.columns.sorted()[: most * each]], "heads for each": each,
            },
            summary=_summary(rows, self.heads),
            rows=rows,
        )  # fmt: skip

    def draw(self, findings: Findings, path: Path, subjects: Subjects | None) -> None:
        """The largest size of dictionary; the others are alike, and in the table."""
        of = {row.what: row.figures for row in findings.rows}
        size = [name for name in of[NONE] if name.startswith("kv.")][-1]
        most = max(self.heads)
        with plotting.drawing(path, width=7.6, height=3.6) as (_, axes):
            axis, ends = axes[0, 0], [(most, value(of[TRANSFORMER][size]), TRANSFORMER, LINES[0])]
            axis.axhline(ends[0][1], color=LINES[0], lw=1.2)
            for color, (curve, label) in zip(COLORS, CURVES.items(), strict=True):
                results = [of[NONE][size], *(of[_row(curve, count)][size] for count in self.heads)]
                values = [value(each) for each in results]
                plotting.draw_line(axis, [0, *self.heads], values, [each.ci95 for each in results], color=color)
                ends.append((most, values[-1], label, color))
            plotting.draw_chance(axis, [0, most], [1 / int(size[3:])] * 2)
            ends.append((most, 1 / int(size[3:]), "chance", plotting.CHANCE))
            plotting.accuracy_axis(axis, xlabel="heads that are attention", xticks=[0, *self.heads])
            kept, drawn = (value(of[_row(curve, most)][size]) for curve in (KEPT, RANDOM))
            axis.set_title(
                f"{size.replace('kv.', '')} pairs, {most} heads of attention: {kept:.2f} where they are the\nTransformer's "
                f"retrieval heads, {drawn:.2f} in random layers"
            )
            name_lines(axis, ends)


class Aligned:
    """Conversions with some heads of attention, layer by layer. A trained mixer is kept in the study's folder: hybrids that
    have as many heads in a layer have the same one. each: heads of the converted model for one of the Transformer's."""

    def __init__(self, study: RetrievalAware, subjects: Subjects, each: int):
        assert subjects.other is not None
        self.study, self.each = study, each
        self.base, self.teacher, self.resume = subjects.checkpoint, subjects.other, subjects.resume
        self.folder, self.tuning, self.job = subjects.out / "mixers", subjects.out / "tuning", subjects.recipe
        self.layers = range(len(subjects.subject.anatomy.blocks))
        self.recipe = _conversion(subjects.recipe.model, subjects.recipe.seed)
        digests = [model_digest(one.model) for one in (self.base, self.teacher)]
        settings = study.model_dump(mode="json", exclude={"heads", "other"})
        self.key = json.dumps([*digests, settings, self.recipe.model_dump(mode="json")], sort_keys=True)

    def distilled(self, heads: Sequence[Site], name: str) -> PreTrainedModel:
        """The converted model with attention for these heads of the Transformer: its mixers were aligned one by one, and then
        distilled together. name: of its row."""
        counts = {layer: sum(site.layer == layer for site in heads) for layer in self.layers}
        model = self._empty(counts, list(self.layers))
        for layer in self.layers:
            mixer_at(model, layer).load_state_dict(self._mixer(layer, counts[layer]))
        tuned(
            model, self.base, self.job, self.tuning / _file(name), plan=self._plan(counts), layers=list(self.layers),
            teacher=self.teacher.model, resume=self.resume, description=name, digest=model_digest(model),
        )  # fmt: skip
        return model.eval()

    def _plan(self, counts: Mapping[int, int]) -> Plan | None:
        """Attention that is as wide as so many of the Transformer's heads in each layer."""
        sites = tuple(Site(layer, tuple(range(count * self.each))) for layer, count in counts.items() if count)
        return Plan(sites=sites, time_step=False, seed=self.recipe.seed) if sites else None

    def _empty(self, counts: Mapping[int, int], layers: list[int]) -> PreTrainedModel:
        """The converted model with so many heads of attention in each layer, and mixers of its own in `layers`."""
        attention = self._plan(counts)
        if attention is None:
            return with_own_mixers(self.base, layers)
        return own_mixers(splice(self.base.model, attention), layers)

    def _mixer(self, layer: int, count: int) -> dict[str, Tensor]:
        path = self.folder / f"L{layer}-{count}.safetensors"
        if path.exists():
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("key") == self.key:
                    return load_file(path)
        say(f"layer {layer} with {count} of the Transformer's heads as attention")
        model = self._empty({layer: count}, [layer])
        align_layers(
            model.train(), self.teacher.model, batches_of_all_kinds(self.base.tokenizer, self.recipe), steps=self.study.steps,
            learning_rate=self.study.learning_rate, layers=[layer],
        )  # fmt: skip
        state = {name: tensor.detach().contiguous() for name, tensor in mixer_at(model, layer).state_dict().items()}
        put(path, save(state, metadata={"key": self.key}))
        return state


def _conversion(name: str, seed: int) -> PretrainRecipe:
    """The recipe by which a model was converted; its data are drawn anew."""
    recipe = read_pretrain_recipe(Path(name) / "recipe.yaml")
    if recipe.teacher is None:
        raise UserError(f"{name} was not converted from a Transformer: its recipe names no teacher")
    return recipe.model_copy(update={"seed": seed})


def _checkpoint(conversion: PreTrainedModel, base: Checkpoint) -> Checkpoint:
    """A conversion without attention, as a base to edit."""
    model = unsplice(conversion)
    return Checkpoint(f"{base.name}, {NONE}", model, base.tokenizer, fingerprint(model))


def _share(theirs: int, ours: int) -> int:
    """How many heads of the converted model are as wide together as one of the Transformer's, where they have so many."""
    if ours % theirs:
        raise UserError(f"the Transformer has {theirs} heads and the converted model {ours}, which is no multiple of them")
    return ours // theirs


def _file(row: str) -> str:
    return row.replace(" ", "-")


def _row(curve: str, count: int) -> str:
    return f"{count} head{'s' * (count > 1)} {curve}"


def _figures(report: ModelReport) -> dict[str, Proportion | Estimate]:
    figures: dict[str, Any] = {f"kv.{size}": accuracy for size, accuracy in report.kv.items()}
    figures |= {} if report.knowledge is None else {"knowledge": report.knowledge}
    return figures | ({} if report.perplexity is None else {"loss on text, nats": report.perplexity.loss})


def _summary(rows: Sequence[Row], heads: Sequence[int]) -> str:
    of = {row.what: row.figures for row in rows}
    sizes = [name for name in of[NONE] if name.startswith("kv.")]
    size = sizes[len(sizes) // 2]
    curves = "; ".join(
        f"{CURVES[curve]}, {', '.join(f'{count}: {value(of[_row(curve, count)][size]):.3f}' for count in heads)}"
        for curve in CURVES
    )
    ends = ", ".join(f"{name} {value(of[name][size]):.3f}" for name in (TRANSFORMER, CONVERTED, NONE))
    return f"At {size[3:]} pairs: {ends}. By the number of heads that are attention: {curves}."


STUDY = RetrievalAware
