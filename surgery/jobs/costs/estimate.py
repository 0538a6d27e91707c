"""estimate(recipe): what `surgery run` will cost on this machine, stage by stage, before any of it is done.

Each stage's own function does a small part of the stage on the recipe's own questions, lessons and text, and is measured. How
often the stage does that follows from the recipe by the functions that do the work. Nothing is written.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from surgery.errors import UserError
from surgery.exporting.verifications import check_way
from surgery.families import family_of
from surgery.jobs.costs.benching import BenchCost, bench_cost
from surgery.jobs.costs.exporting import export_cost, started, weights_of
from surgery.jobs.costs.growing import growing_cost, shrinking_cost
from surgery.jobs.costs.locating import locating_cost
from surgery.jobs.costs.models import Models, Trained, all_names, assumed, bare, models_of
from surgery.jobs.costs.record import Estimate, Stage, fitting_advice
from surgery.jobs.costs.sample import Patient, Sample, sampled, total
from surgery.jobs.costs.tuning import STATES, StageCost, Tuned, held_beyond, tuning_cost
from surgery.jobs.opening import open_base
from surgery.jobs.preparing import check, check_run
from surgery.kernels.dispatch import use
from surgery.loading.checkpoint import Checkpoint
from surgery.loading.opened import a_type, model_of
from surgery.locating.questions import question_set
from surgery.probes.encoded import padded
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.record import environment
from surgery.runtime import memory
from surgery.runtime.processes import several_processes
from surgery.runtime.progress import busy, silently
from surgery.splicing.splice import adopt
from surgery.tuning.backward_memory import Checkpointing, step_fits

CHECKPOINTS = 2  # of a tuning, while a new one replaces the old
SMALLER = "Open the model in less precision (--set dtype=bfloat16), or take a machine with more."


def estimate(recipe: Recipe, out: str | Path = "runs", *, verify: str = "auto", trust_remote_code: bool = False) -> Estimate:
    """What run(recipe, out, verify=...) will cost: each stage's time, peak memory and disk, against what this machine has, and
    what to change where it does not fit. The result prints as a table.

    It takes a small part of the run: the model is opened, and a batch of each stage is done. Raises UserError for whatever run
    would refuse before its work begins, and for a recipe of a study.
    """
    if not isinstance(recipe, Recipe):
        raise UserError(f"surgery.estimate takes a recipe, as surgery.read_recipe returns it, not {a_type(recipe)}")
    if recipe.study is not None:
        raise UserError("a study has no estimate; leave out the key study for that of the main job")
    if several_processes():
        raise UserError("an estimate is made by one process; start it without a launcher")
    check_way(verify)
    begun, cpu = time.perf_counter(), started()
    with use(**recipe.kernels):
        with busy("opening the model"):
            base = open_base(recipe, trust_remote_code)
        family_of(base.model.config)
        check(recipe, base)
        check_run(recipe, base)
        start = started() - cpu if cpu > 120 else started()  # a notebook has done other work before
        with busy("measuring a part of each stage"), silently():
            costs = Costs(recipe, base, start, verify=verify)
            stages = costs.all_stages()
    return Estimate(
        **environment().model_dump(), model=recipe.model, stages=tuple(stages), available=costs.available,
        free_disk=memory.free_disk(out), tried=costs.patient.note, assumptions=costs.assumptions(),
        advice=costs.advice(stages, memory.free_disk(out)), took=time.perf_counter() - begun,
    )  # fmt: skip


class Costs:
    """The costs of a run's stages on an open model. start: seconds of CPU time that a process takes to begin.

    quick: less is measured, and nothing counted, so that a run can afford it while it works.
    """

    def __init__(self, recipe: Recipe, base: Checkpoint, start: float, quick: bool = False, verify: str = "auto"):
        self.verify = verify
        self.recipe, self.base, self.start, self.quick = recipe, base, start, quick
        self.on_gpu = base.model.device.type == "cuda"
        device = base.model.device
        options = recipe.locate.model_copy(update={"examples": max(2, min(recipe.locate.batch_size, recipe.locate.examples))})
        first = question_set(base.tokenizer, options, options, seed=recipe.seed, device=device)
        ids = padded(first.groups[0][1].rows, device)[0]
        _import_what_a_run_needs()
        self.before = self._held_now()
        self.available = self.before + memory.available(device)
        self.patient = Patient(base.model, base.tokenizer, ids, quick)
        self.settings: dict[str, tuple[dict[str, int], str]] = {}
        self.held = self.before
        self._models_at: dict[tuple[int, int], Models] = {}
        self._known_names: dict[str, list[str]] = {}

    def _models(self, chosen: Plan, depth: int, first: int = 0) -> Models:
        """The run's models at a depth, made once. Those that are tuned for a sample are not asked anything afterwards."""
        key = depth, 0 if depth == self.patient.depth else first  # the whole model has its grafts where the plan says
        if key not in self._models_at:
            self._models_at[key] = models_of(self.patient, self.recipe, chosen, *key)
        return self._models_at[key]

    def roughly(self) -> float:
        """Seconds of the whole run, by one forward alone: whether it is worth a closer look."""
        options, (locate, tune) = self.recipe.bench, (self.recipe.locate, self.recipe.tune)
        models, tuned = (4 + 2 * options.random_sites, 4 + (tune.lora is not None)) if options.controls else (3, 1)
        sizes = len(options.pairs) + 4
        forwards = 2 * locate.examples / locate.batch_size + 4 * tuned * tune.most_steps
        return self.patient.step * (forwards + models * sizes * options.seeds * options.limit / options.batch_size)

    def _held_now(self) -> int:
        return memory.device_held() if self.on_gpu else memory.resident()

    def all_stages(self, first: str = "locate") -> list[Stage]:
        """The stages in their order, for a plan that is not yet known. first: those before it are finished, and not measured;
        but the models are made, which are held from then on."""
        chosen = assumed(self.recipe, self.patient.depth, self.patient.heads)
        stages: list[Stage] = [self.locate()] if first == "locate" else []
        stages += [self.grow(chosen)] if self.recipe.plan.opens and first in ("locate", "plan") else []
        made = self.splice(chosen)
        stages += [made] if first in ("locate", "plan", made.name) else []
        stages += self.tune(chosen, first) if first not in ("bench", "export") else []
        stages += [self.bench(chosen)] if first != "export" else []
        return [*stages, self.export(chosen)]

    def assumptions(self) -> tuple[str, ...]:
        """What is not known before the run."""
        result = []
        if self.recipe.plan.sites is None:
            result.append("Which heads lead is known after locating: the grafts are taken to be in the first layers, where "
                          "tuning costs most.")  # fmt: skip
        if self.recipe.plan.grows:
            result.append("plan.heads=auto is taken to add as many heads as it may (plan.auto.max_heads).")
        if self.recipe.plan.state_size is not None:
            result.append("plan.state_size is not counted: the models are taken to have the whole state.")
        if self.recipe.tune.steps == "auto":
            result.append("tune.steps=auto is taken to need as many steps as it may (tune.max_steps).")
        if self.recipe.tune.early_stopping is not None:
            result.append("tune.early_stopping may end the steps early.")
        if self.recipe.tune.repeat is not None:
            result.append("What tune.repeat keeps of batches that come again is not counted as saved.")
        return tuple(result)

    def locate(self) -> Stage:
        """locate, with what a search may measure at most."""
        options = self.recipe.locate
        cost = locating_cost(self.patient, options, self.recipe.seed, self.quick)
        self.settings["locate"] = {"locate.batch_size": options.batch_size}, SMALLER
        counted = cost.passes
        counts = {"forwards": counted.base, "forwards and backwards": counted.starts + counted.slopes}
        counts |= {"heads and layers ablated or spliced in a batch": counted.variants} if counted.variants else {}
        return self._stage("locate", cost.sample, counts=counts, at_most=counted.at_most)

    def grow(self, chosen: Plan) -> Stage:
        """plan, where heads are found by measuring, or dimensions of the state are."""
        counts: dict[str, int] = {}
        parts: list[Sample] = []
        self.settings["plan"] = {}, SMALLER
        if self.recipe.plan.measures:
            counts["plans measured"], sample = growing_cost(self.patient, self.recipe, bare(chosen))
            parts.append(sample)
            self.settings["plan"] = {"locate.batch_size": self.recipe.locate.batch_size}, SMALLER
        if self.recipe.plan.state_size is not None:
            counts["forwards and backwards"], sample = shrinking_cost(self.patient, self.recipe, bare(chosen))
            parts.append(sample)
        return self._stage("plan", total(parts), counts=counts, at_most=self.recipe.plan.measures)

    def splice(self, chosen: Plan) -> Stage:
        """plan and splice: the models of the run are made. From here on they are held."""

        def making(depth: int) -> Sample:
            sample = sampled(lambda: self._models(chosen, depth), repeat=False)
            entries = self._models(chosen, depth).entries
            others = [model_of(entry.model, "bench") for entry in entries.values()]
            lacking = len([name for name in self._names(chosen) if name not in entries])
            graft = held_beyond([model_of(entries["spliced"].model, "bench")], self.patient.model)
            return Sample(sample.seconds, held_beyond(others, self.patient.model) + lacking * graft)

        sample = self.patient.along(making)
        self.held = self.before + int(sample.bytes)
        return self._stage("plan and splice", Sample(sample.seconds, 0))

    def _names(self, chosen: Plan) -> list[str]:
        """Of all entries of the run."""
        if (key := str(chosen)) not in self._known_names:
            self._known_names[key] = all_names(self.patient, self.recipe, chosen)
        return self._known_names[key]

    def tune(self, chosen: Plan, start: str = "") -> list[Stage]:
        """A stage for every model that is tuned. Models whose training begins in the same layer cost the same; one for which
        there is no room in the layers that are tried costs what the chosen plan does. start: the first stage of them that is
        not finished, by default the first."""
        whole = len(self.patient.depths) == 1
        options = self.recipe.tune
        tried = self._models(chosen, self.patient.depths[-1]).trained
        names = [name for name in self._names(chosen) if name.endswith("tuned")]
        names = names[next((i for i, name in enumerate(names) if f"tune {name}" == start), 0) :]
        known: dict[tuple[int, bool], Any] = {}
        result = []
        for name in names:
            stands_for = name if name in tried else "tuned"
            trained = tried[stands_for]
            sites = _grafts(chosen) if trained.layers is None else len(chosen.sites)
            first = trained.first if whole else min(site.layer for site in chosen.sites)
            key = (0, False) if self.quick else (first, trained.layers is not None)
            if key not in known:
                known[key] = self._tuning_cost(partial(self._tuned, chosen, stands_for), first, whole, sites)
            cost = known[key]
            rows = {f"tune.{size}": getattr(options, size) for size in ("batch_size", "text_batch_size")}
            more = "" if options.gradient_checkpointing else "--set tune.gradient_checkpointing=true, or "
            self.settings[f"tune {name}"] = rows, f"Try {more}shorter tune.text_tokens."
            disk = CHECKPOINTS * (STATES - 1) * 4 * cost.trained
            at_most = (
                options.early_stopping is not None
                or options.steps == "auto"
                or self.recipe.plan.grows
                or options.repeat is not None
                or bool(self.recipe.plan.sites is None and self.patient.depth > 1)
            )
            result.append(self._stage(f"tune {name}", cost.sample, disk, {"steps": sum(cost.steps.values())}, at_most))
        return result

    def _tuning_cost(self, make: Callable[[int, int], Tuned], first: int, whole: bool, sites: int) -> StageCost:
        """tuning_cost. Of tune.gradient_checkpointing=auto: with it, if without it a step would not fit where the run looks."""

        def cost(checkpointing: Checkpointing) -> StageCost:
            tune = self.recipe.tune.model_copy(update={"gradient_checkpointing": checkpointing})
            return tuning_cost(self.patient, self.recipe.model_copy(update={"tune": tune}), make, first, whole, sites)

        if (chosen := self.recipe.tune.gradient_checkpointing) != "auto":
            return cost(chosen)
        plain = cost(False)
        return plain if step_fits(plain.sample.bytes, self.available - self.held) else cost(True)

    def _tuned(self, chosen: Plan, name: str, depth: int, first: int) -> Tuned:
        trained: Trained = self._models(chosen, depth, first).trained[name]
        sites = _grafts(trained.plan) if trained.layers is None else len(trained.layers)
        return Tuned(trained.model, trained.layers, adopt(self.patient.at(depth)), sites)

    def bench(self, chosen: Plan) -> Stage:
        """bench, of all models together."""
        plain = () if self.quick else ("base", "control_tuned", "control_lora_tuned")
        kinds = {name: "base" if name in plain else "hybrid" for name in self._names(chosen)}

        def hybrid(depth: int) -> Any:
            return model_of(self._models(chosen, depth).entries["spliced"].model, "bench").eval()

        cost: BenchCost = bench_cost(self.patient, self.recipe, {"base": self.patient.at, "hybrid": hybrid}, kinds, self.quick)
        self.settings["bench"] = {"bench.batch_size": self.recipe.bench.batch_size}, SMALLER
        counts = {"models": len(kinds)} | ({} if cost.forwards is None else {"forwards": cost.forwards * len(kinds)})
        return self._stage("bench", cost.sample, counts=counts)

    def export(self, chosen: Plan) -> Stage:
        """export, with its proof in a fresh process."""

        def hybrid(depth: int) -> Any:
            return model_of(self._models(chosen, depth).entries["spliced"].model, "bench").eval()

        process = 0 if self.on_gpu else self.before - weights_of(self.patient.model)
        sample, child = export_cost(self.patient, hybrid, self.start, max(0, process), self.verify, self.quick)
        self.settings["export"] = {}, "Try --verify layers, which takes less, or --verify tensors."
        whole = Sample(sample.seconds, sample.bytes if self.on_gpu else max(sample.bytes, child))  # one after the other
        return self._stage("export", whole, weights_of(self.patient.model))

    def _stage(
        self, name: str, sample: Sample, disk: int = 0, counts: dict[str, int] | None = None, at_most: bool = False
    ) -> Stage:
        return Stage(
            name=name, seconds=sample.seconds, memory=int(self.held + sample.bytes), disk=int(disk), counts=counts or {},
            at_most=at_most,
        )  # fmt: skip

    def advice(self, stages: list[Stage], free: int) -> tuple[str, ...]:
        """A line for every stage that does not fit, one for the disk, and one for the stage that takes most of a long run."""
        result = []
        for stage in stages:
            if stage.memory > self.available:
                settings, remedy = self.settings.get(stage.name, ({}, SMALLER))
                result.append(fitting_advice(stage, self.held, self.available, settings, remedy))
        if (disk := sum(stage.disk for stage in stages)) > free:
            result.append(
                f"The disk has {memory.size(free)} free, and the run needs {memory.size(disk)}: choose another --out."
            )
        return tuple(result)


def _import_what_a_run_needs() -> None:
    """What stages import when they begin is in memory from then on."""
    import accelerate  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import scipy.optimize  # noqa: F401


def _grafts(plan: Plan) -> int:
    """How many heads, or layers, a plan grafts."""
    return sum(max(1, len(site.heads)) for site in plan.sites)
