"""The main job once through: locate, plan, splice, tune, export, bench. One recipe in, one folder out.

Every stage leaves its result in the folder; with `resume`, a stage whose result is there is not repeated, a tuning continues
from its last checkpoint, and a finished cell of the bench is not measured again.
"""

import copy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from surgery.evaluation import markdown
from surgery.evaluation.bench import Entry, measure
from surgery.evaluation.head_matrices import mixing
from surgery.evaluation.report import Report
from surgery.exporting.export import export
from surgery.families import family_of
from surgery.jobs.locating_stage import RANKING, located
from surgery.jobs.opening import open_base, open_donor
from surgery.jobs.preparing import check, check_run, prepare
from surgery.jobs.report_folder import describe, write_report
from surgery.kernels.dispatch import use
from surgery.loading.checkpoint import Checkpoint
from surgery.locating.example import short_question
from surgery.locating.planning import plan, random_plan
from surgery.locating.questions import described
from surgery.locating.ranking import Ranking
from surgery.probes.knowledge import PARTS, Knowledge
from surgery.records.names import public
from surgery.records.plan import Plan, published
from surgery.records.recipe import Recipe
from surgery.records.record import provenance, write_text
from surgery.runtime.processes import on_main
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt, splice
from surgery.tuning.loop import tune
from surgery.tuning.lora import matches
from surgery.tuning.state import Log


def run(recipe: Recipe, out: Path, *, resume: bool = False, trust_remote_code: bool = False) -> Report:
    """Do everything. Writes into `out`: ranking.json, atlas.png, mixing.png, plan.json, report.json, report.md, report.html,
    mixing.json, grafts.png, retrieval.png, cost.png, the tuning logs, and hybrid/, the exported checkpoint. Processes that
    accelerate started share the work."""
    with use(**recipe.kernels):
        base = open_base(recipe, trust_remote_code)
        family_of(base.model.config)  # before the work begins: nothing else can be grafted
        check(recipe, base)
        check_run(recipe, base)
        if recipe.tune.lora is not None:
            matches(adopt(base.model), recipe.tune.lora)
        on_main(partial(prepare, out, recipe, resume))
        job = _Job(recipe, out, base, resume)
        ranking = job.locate()
        chosen = job.plan(ranking)
        job.donor = open_donor(chosen, trust_remote_code)
        entries = job.models(ranking, chosen)
        return job.finish(ranking, chosen, entries)


class _Job:
    def __init__(self, recipe: Recipe, out: Path, base: Checkpoint, resume: bool):
        self.recipe, self.out, self.base, self.resume = recipe, out, base, resume
        self.settings = public(recipe.model_dump(mode="json"))
        self.timings: dict[str, float] = {}
        self.training: dict[str, dict[str, float]] = {}
        self.donor: PreTrainedModel | None = None

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        say(what)
        start = time.monotonic()
        yield
        self.timings[name] = round(time.monotonic() - start, 2)

    def locate(self) -> Ranking:
        options = self.recipe.locate
        if self.resume and (self.out / RANKING).exists():
            return located(self.recipe, self.base, self.out, resume=True)
        with self.stage("locate", f"locating: {options.examples} questions of {described(options.probe, options.options)}"):
            return located(self.recipe, self.base, self.out, resume=self.resume)

    def plan(self, ranking: Ranking) -> Plan:
        chosen = plan(ranking, **self.recipe.plan.model_dump(), seed=self.recipe.seed)
        on_main(partial(chosen.write, self.out / "plan.json"))
        say(f"plan: attention at {markdown.places(chosen)}")
        return chosen

    def tune(self, name: str, model: PreTrainedModel, layers: list[int] | None = None) -> PreTrainedModel:
        with self.stage(f"tune {name}", f"tuning {name}: {self.recipe.tune.steps} steps"):
            log = tune(
                model, self.base.tokenizer, self.recipe.tune, data=self.recipe.data, seed=self.recipe.seed, layers=layers,
                teacher=adopt(self.base.model), out=self.out / "tuning" / name, resume=self.resume, description=name,
            )  # fmt: skip
        end = [record for record in log if "retrieval" in record][-10:]
        end = [record for record in end if record["stage"] == end[-1]["stage"]]
        self.training[name] = {key: sum(r[key] for r in end) / len(end) for key in ("loss", "retrieval", "kl") if end}
        on_main(partial(write_text, self.out / "tuning" / f"{name}.csv", _csv(log)))
        return model

    def models(self, ranking: Ranking, chosen: Plan) -> dict[str, Entry]:
        base, recipe, donor = self.base.model, self.recipe, self.donor
        start = "a donor's" if chosen.init == "donor" else "the heads' own" if chosen.init == "dual" else "random"
        entries = {
            "base": Entry(base, "the pretrained model, unchanged"),
            "spliced": Entry(
                splice(base, chosen, donor), f"attention spliced in, initialised from {start} weights, no training", chosen
            ),
            "tuned": Entry(
                self.tune("tuned", splice(base, chosen, donor)), f"the same, its grafts tuned{_division(recipe)}", chosen
            ),
        }
        if recipe.bench.controls:
            layers = [site.layer for site in chosen.sites]
            names = ", ".join(f"L{layer}" for layer in layers)
            entries["control_tuned"] = Entry(
                self.tune("control_tuned", copy.deepcopy(adopt(base)), layers),
                f"no graft: the base's own mixer of {names} tuned on the same data for the same steps",
            )
            for i in range(recipe.bench.random_sites):
                if elsewhere := random_plan(ranking, chosen, recipe.seed + i):
                    name = "control_random_site" + (f"_{i + 1}" if i else "")
                    what = "the graft at random heads of other layers, no training"
                    entries[name] = Entry(splice(base, elsewhere, donor), what, elsewhere)
                    if i == 0:
                        tuned = self.tune(f"{name}_tuned", splice(base, elsewhere, donor))
                        entries[f"{name}_tuned"] = Entry(tuned, "the same, its grafts tuned", elsewhere)
            if beside := random_plan(ranking, chosen, recipe.seed, same_layers=True):
                what = "the graft at random other heads of the same layer, no training"
                entries["control_same_layer"] = Entry(splice(base, beside, donor), what, beside)
                tuned = self.tune("control_same_layer_tuned", splice(base, beside, donor))
                entries["control_same_layer_tuned"] = Entry(tuned, "the same, its grafts tuned", beside)
        for dose in recipe.bench.doses:
            leading = plan(ranking, **recipe.plan.model_dump() | {"heads": dose, "sites": None}, seed=recipe.seed)
            entries[f"dose_{dose}"] = Entry(
                splice(base, leading, donor), f"the leading heads spliced, {dose} of them, no training", leading
            )
        return entries

    def finish(self, ranking: Ranking, chosen: Plan, entries: dict[str, Entry]) -> Report:
        recipe = self.recipe
        with self.stage("bench", f"measuring {len(entries)} models"):
            measured = measure(
                entries, self.base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=self.out / "cells",
                part=None if recipe.tune.early_stopping is None else "bench",
            )  # fmt: skip
        report = Report(
            provenance=provenance(self.base.name, self.base.fingerprint, recipe.seed, self.settings),
            plan=published(chosen),
            models=measured,
            timings=self.timings,
            training=self.training,
            settings=self.settings["bench"],
        )
        return on_main(partial(self.write, report, ranking, chosen, entries))

    def write(self, report: Report, ranking: Ranking, chosen: Plan, entries: dict[str, Entry]) -> Report:
        """The report, the hybrid, and the report once more with all times in it."""
        recipe, tuned = self.recipe, entries["tuned"].model
        example = short_question(self.base.tokenizer, recipe.locate.probe, recipe.locate.options, recipe.seed)
        matrices = mixing(entries, self.base.tokenizer, example, report.provenance, [score.site for score in ranking.heads])
        write_report(report, self.out, matrices)  # before the export, which takes report.html along
        with self.stage("export", "exporting, and comparing the reloaded model with the live one"):
            export(
                tuned, self.out / "hybrid", tokenizer=self.base.tokenizer, plan=chosen, base=self.base.name, recipe=recipe,
                report=report, figures=self.out,
            )  # fmt: skip
        report = report.model_copy(update={"timings": self.timings})
        describe(report, self.out, matrices)
        return report


def _division(recipe: Recipe) -> str:
    """Who asked which of a file's facts, if tuning watched over them."""
    if recipe.tune.early_stopping is None or recipe.data.facts == "world":
        return ""
    kept, measured = (len(Knowledge(recipe.data.facts, part).questions(sys.maxsize, seed=0)) for part in PARTS)
    return f"; tune.early_stopping asked {kept} of the {kept + measured} facts, bench the other {measured}"


def _csv(log: Log) -> str:
    """One line a record; what one of them does not have is left empty."""
    names = dict.fromkeys(name for record in log for name in record)
    lines = [names, *([_figure(record.get(name, "")) for name in names] for record in log)]
    return "".join(",".join(line) + "\n" for line in lines)


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
