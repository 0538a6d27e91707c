"""estimate(recipe): what `surgery run` will cost on this machine, stage by stage, before any of it is done.

What each stage will run is counted (counts.py); what a forward and a step of tuning take is timed on the very model, each at
two sizes (models/pace.py, rehearsal.py). Nothing is written.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.costs import counts
from surgery.costs.models import Trained, assumed, held_beyond, models_of, remap_layers, truncate_layers, weights_of
from surgery.costs.record import CostEstimate, Stage, fitting_advice
from surgery.costs.rehearsal import rehearse, step_work
from surgery.costs.searching import attribution_costs, forwards, skill_passes
from surgery.errors import UserError
from surgery.exporting.verifications import check_way
from surgery.exporting.verify import NEW_BY_LAYERS, chosen, whole_size
from surgery.families import family_of
from surgery.jobs.opening import open_base
from surgery.jobs.preparing import check, check_run
from surgery.kernels.dispatch import use
from surgery.loading.opened import Checkpoint, a_type
from surgery.locating.attribution_memory import activations
from surgery.locating.budget import exactness
from surgery.locating.passes import batch_of, counted
from surgery.locating.questions import question_sets
from surgery.locating.skill_scores import skill_sets
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated
from surgery.models import pace
from surgery.models.anatomy import anatomy
from surgery.models.answers import NEW
from surgery.models.pace import Pace, Work, forward_pace
from surgery.probes.encoded import padded
from surgery.records.recipe import Recipe, Tune
from surgery.records.record import environment
from surgery.runtime import memory
from surgery.runtime.processes import several_processes
from surgery.runtime.progress import busy, say, silently
from surgery.runtime.timing import Stopwatch
from surgery.splicing.splice import adopt, graft_parameters, splice
from surgery.tuning.backward_memory import step_fits

CHECKPOINTS = 2  # of a tuning, while a new one replaces the old
STATES = 4  # of a trained number, in float32: itself, its gradient, and Adam's two moments
STARTING = 30.0  # seconds of CPU time that a process takes to begin, at most
READINGS = 6  # of all weights in an export: it writes, digests and reads them back
GUESSED = 4  # forwards: a step of tuning that was not timed
WHOLE = 2.0  # seconds: of a model whose forward of one row takes longer, the first layers alone are tuned
CUT = (2, 4)  # layers of it
ROW = 8192  # tokens, of a comparison's longest row that is timed
SMALLER = "Open the model in less precision (--set dtype=bfloat16), or take a machine with more."


def estimate(
    recipe: Recipe, out: str | Path = "runs", *, verify: str = "auto", trust_remote_code: bool = False
) -> CostEstimate:
    """What run(recipe, out, verify=...) will cost: each stage's time, peak memory and disk, against what this machine has, and
    what to change where it does not fit. The result prints as a table.

    The model is opened, and a forward and a few steps of tuning are done. Raises UserError for whatever run would refuse before
    its work begins, and for a recipe of a study.
    """
    if not isinstance(recipe, Recipe):
        raise UserError(f"surgery.estimate takes a recipe, as surgery.read_recipe returns it, not {a_type(recipe)}")
    if recipe.study is not None:
        raise UserError("a study has no estimate; leave out the key study for that of the main job")
    if several_processes():
        raise UserError("an estimate is made by one process; start it without a launcher")
    check_way(verify)
    begun, waiting = time.perf_counter(), pace.load()
    with use(**recipe.kernels):
        with busy("opening the model"):
            base = open_base(recipe, trust_remote_code)
        family_of(base.model.config)
        check(recipe, base)
        check_run(recipe, base)
        costs = Costs(recipe, base, started(), verify=verify, says=True)
        stages = costs.all_stages()
    return costs.estimated(stages, out, begun, waiting)


class StageCosts:
    """The costs of the stages that need nothing but an open model. says: whether it says what it does."""

    forward: Pace
    step: Pace | None = None
    tried = ""  # what was tuned, where that was not the whole model

    def __init__(self, recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, says: bool = False):
        self.recipe, self.model, self.tokenizer, self.says = recipe, model, tokenizer, says
        self.device = self.model.device
        _import_what_a_run_needs()
        on_gpu = self.device.type == "cuda"
        self.before = self.held = memory.device_held() if on_gpu else memory.resident()
        self.available = self.before + memory.available(self.device)
        self.settings: dict[str, tuple[dict[str, int], str]] = {}

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        if self.says:
            say(f"estimate: {what} ...")
        with silently():
            yield

    @property
    def slowed(self) -> float:
        """How many times as long as on an idle machine the work that was timed took."""
        return round(max(self.forward.slowed, self.step.slowed if self.step else 1.0), 2)

    def _bench(self, paces: Sequence[Pace], counted: counts.Benching) -> Stage:
        """bench, of all models together. paces: of a forward of each."""
        self.settings["bench"] = {"bench.batch_size": self.recipe.bench.batch_size}, SMALLER
        models, work = len(paces), counted.work
        does = {"models": models} | ({"forwards": round(work.calls) * models} if counted.exact else {})
        seconds = sum(pace.time(work) + counted.encoding + self._reading() for pace in paces) + counted.making
        held = max(pace.memory(work.largest) for pace in paces)
        return self._stage("bench", seconds, held, does=does, at_most=counted.at_most)

    def _reading(self) -> float:
        """The seconds of a digest of all weights."""
        part = bytes(2**24)
        watch = Stopwatch(self.device)
        hashlib.sha256(part).digest()
        return watch.read()[0] * weights_of(self.model) / len(part)

    def _stage(
        self, name: str, seconds: float, held: float, *, disk: float = 0, does: dict[str, int] | None = None,
        at_most: bool = False,
    ) -> Stage:  # fmt: skip
        return Stage(
            name=name, seconds=seconds, memory=int(self.held + held), disk=int(disk), counts=does or {}, at_most=at_most
        )

    def advice(self, stages: list[Stage], free: int) -> tuple[str, ...]:
        """A line for every stage that does not fit, and one for the disk."""
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

    def assumptions(self) -> tuple[str, ...]:
        """What is not known before."""
        raise NotImplementedError

    def estimated(self, stages: list[Stage], out: str | Path, begun: float, waiting: float) -> CostEstimate:
        """All of it, of a run into `out`. begun: when the estimate began, by time.perf_counter(). waiting: the programs for
        every CPU by then."""
        free = memory.free_disk(out)
        return CostEstimate(
            **environment().model_dump(), model=self.recipe.model, stages=tuple(stages), available=self.available,
            free_disk=free, tried=self.tried, assumptions=self.assumptions(), slowed=self.slowed, load=round(waiting, 2),
            advice=self.advice(stages, free), took=time.perf_counter() - begun,
        )  # fmt: skip


class Costs(StageCosts):
    """The costs of a run's stages. start: seconds of CPU time that a process takes to begin."""

    def __init__(self, recipe: Recipe, base: Checkpoint, start: float, *, verify: str = "auto", says: bool = False):
        super().__init__(recipe, adopt(base.model).eval(), base.tokenizer, says=says)
        self.start, self.verify = start, verify
        self.depth, self.heads = family_of(self.model.config).shape(self.model.config)
        self.subject = Subject(self.model, self.tokenizer, anatomy(self.model))
        self.sets = question_sets(self.tokenizer, recipe.locate, seed=recipe.seed, device=self.device)
        ids, _ = padded(self.sets[0].groups[0][1].rows, self.device)
        self.row = ids.shape[1]
        with self._doing("timing a forward"):
            self.forward = forward_pace(self.model, ids, memory=True)
        self.plan = assumed(recipe, self.model)

    def all_stages(self, first: str = "locate", timed: bool = True) -> list[Stage]:
        """The stages in their order, for a plan that is not yet known, from the first on that is not finished. timed: whether
        steps of tuning are taken; else they are guessed by the forward."""
        self.held = self.before
        with self._doing("making the models of the run"):
            entries, tuned = models_of(self.model, self.recipe, self.plan)
            models = len(entries)
            stages = [self._locate()]
            self.held += held_beyond(entries.values(), self.model)
            del entries
        if timed and first not in ("bench", "export"):
            with self._doing("timing steps of tuning"):
                self.step, adapters = self._timed_step()
        else:
            self.step, adapters = self.forward.times(GUESSED), 0
        with self._doing("counting"):
            if self.recipe.plan.opens:
                stages.append(self._planning(next(iter(tuned.values()), None), self.step, adapters))
            stages += [self._tune(name, trained, self.step, adapters) for name, trained in tuned.items()]
            limit = None if timed else 2 * self.recipe.bench.batch_size
            counted = counts.benching(self.recipe, self.model, self.tokenizer, limit)
            stages += [self._bench([self.forward] * models, counted), self._export()]
        names = [stage.name for stage in stages]
        return stages[names.index(first) if first in names else 0 :]

    def assumptions(self) -> tuple[str, ...]:
        result = []
        if self.recipe.plan.sites is None and self.recipe.plan.kind != "window":
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
        return tuple(result)

    def _locate(self) -> Stage:
        """locate, with what a search may measure at most."""
        options, sets = self.recipe.locate, self.sets
        options = options.model_copy(update={"exact": exactness(options, self.subject, sets, self.forward)})
        each, share = counted(sets, options, self.subject)
        parts = [(each, batch_of(sets))]
        if skills := skill_sets(self.subject, self.recipe.data, options, sets[0], seed=self.recipe.seed):
            heads = len(self.subject.anatomy.coordinates[0])
            parts.append((skill_passes(skills, options, heads, self.subject.graftable), batch_of(skills)))
        costs = attribution_costs(self.subject, sets[0].groups[0][1], self.forward) if self.subject.graftable else ()
        seconds = sum(
            self.forward.time(batch * forwards(part, share, batch.tokens / self.row, *costs)) for part, batch in parts
        )  # fmt: skip
        held = self.forward.memory(max(batch.largest for _, batch in parts))
        if self.subject.graftable:
            encoded = max((each for _, each in sets[0].groups), key=lambda each: len(each.rows) * max(map(len, each.rows)))
            kept = activations(fully_gated(self.subject), min(encoded.rows, key=len))
            step = kept.step(encoded, memory.spare(self.device), whole="batch_size" in options.model_fields_set)
            held = max(held, kept.bytes(encoded, step))
        self.settings["locate"] = {"locate.batch_size": options.batch_size}, SMALLER
        does = {
            "forwards": sum(part.base for part, _ in parts),
            "forwards and backwards": sum(part.starts + part.slopes for part, _ in parts),
        }  # fmt: skip
        if variants := sum(part.variants for part, _ in parts):
            does["heads and layers ablated or spliced in a batch"] = variants
        return self._stage("locate", seconds, held, does=does, at_most=each.at_most)

    def _planning(self, trained: Trained | None, step: Pace, adapters: int) -> Stage:
        """plan, where heads are found by measuring, or dimensions of the state are. trained: what a trial trains, about."""
        work = counts.planning(self.recipe, self.tokenizer, self.depth * self.heads)
        self.settings["plan"] = {"locate.batch_size": self.recipe.locate.batch_size}, SMALLER
        measures = self.recipe.plan.measures
        most = counts.plans_measured(self.recipe, self.depth * self.heads)
        does = {"plans measured": most.plans + most.asked} if measures else {}
        seconds, held = self.forward.time(work), self.forward.memory(work.largest)
        auto = self.recipe.plan.auto
        if measures and trained and auto.steps and most.tuned:
            does["steps"] = most.tuned * auto.steps
            a_step, seconds_of_trial = self._tuning(counts.trial_of(self.recipe), trained, step)
            seconds += most.tuned * seconds_of_trial
            held = max(held, step.memory(a_step.largest) + STATES * 4 * (trained.numbers + adapters))
        return self._stage("plan", seconds, held - (self.held - self.before), does=does, at_most=measures)

    def _tuning(self, recipe: Recipe, trained: Trained, step: Pace) -> tuple[Work, float]:
        """(a step, the seconds of all that tuning does). A layer below the first that is trained has no backward pass."""
        options = recipe.tune
        a_step, _ = step_work(self.tokenizer, options, recipe.data, recipe.seed)
        timed_at = 0 if self.tried else min((site.layer for site in self.plan.sites), default=0)
        factor = (3 - 2 * trained.first / self.depth) / (3 - 2 * timed_at / self.depth)
        beside = counts.beside_the_steps(recipe, self.tokenizer, a_step)
        return a_step, step.time(a_step * options.most_steps) * factor + self.forward.time(beside)

    def _timed_step(self) -> tuple[Pace, int]:
        """(the pace of a step of the chosen plan, how many numbers of adapters are trained). Of
        tune.gradient_checkpointing=auto: with it, if without it a step would not fit where the run looks."""
        options = self.recipe.tune
        auto = options.gradient_checkpointing == "auto"
        plain = options.model_copy(update={"gradient_checkpointing": False}) if auto else options
        step, adapters = self._rehearsed(plain)
        largest = step_work(self.tokenizer, options, self.recipe.data, self.recipe.seed)[0].largest
        if auto and not step_fits(step.memory(largest), self.available - self.held):
            return self._rehearsed(options.model_copy(update={"gradient_checkpointing": True}))
        return step, adapters

    def _rehearsed(self, options: Tune) -> tuple[Pace, int]:
        """The same with these options. A deep model is tuned at two depths, from which the line goes on."""
        deep = self.depth > CUT[1] and self.forward.time(Work(1, self.row)) > WHOLE
        self.tried = f"{CUT[0]} and {CUT[1]} of its {self.depth} layers" if deep else ""
        results = []
        for depth in CUT if deep else (self.depth,):
            model = truncate_layers(self.model, depth) if deep else self.model
            if deep and not self.plan.sites:  # windows, of an attention that may be deeper
                hybrid = adopt(model)
            else:
                hybrid = splice(model, remap_layers(self.plan, depth) if deep else self.plan)
            done = rehearse(
                hybrid, self.tokenizer, options, data=self.recipe.data, seed=self.recipe.seed, teacher=adopt(model)
            )  # fmt: skip
            own = sum(p.numel() for p in graft_parameters(hybrid).values())
            results.append((done.pace, done.numbers() - own))
        if not deep:
            return results[0]
        (low, few), (high, more) = results
        part = (self.depth - CUT[0]) / (CUT[1] - CUT[0])
        return low.along(high, part), round(few + part * (more - few))

    def _tune(self, name: str, trained: Trained, step: Pace, adapters: int) -> Stage:
        """Of a model that is tuned."""
        options = self.recipe.tune
        a_step, seconds = self._tuning(self.recipe, trained, step)
        numbers = trained.numbers + adapters
        rows = {f"tune.{size}": getattr(options, size) for size in ("batch_size", "text_batch_size")}
        more = "" if options.gradient_checkpointing else "--set tune.gradient_checkpointing=true, or "
        self.settings[f"tune {name}"] = rows, f"Try {more}shorter tune.text_tokens."
        at_most = (
            options.early_stopping is not None or options.steps == "auto" or self.recipe.plan.grows
            or bool(self.recipe.plan.sites is None and self.depth > 1)
        )  # fmt: skip
        return self._stage(
            f"tune {name}", seconds, step.memory(a_step.largest) + STATES * 4 * numbers,
            disk=CHECKPOINTS * (STATES - 1) * 4 * numbers, does={"steps": options.most_steps}, at_most=at_most,
        )  # fmt: skip

    def _export(self) -> Stage:
        """export, with its proof in a fresh process."""
        way = chosen(self.verify, self.model)
        proof = self.forward.time(Work.of(counts.proof_shapes({"full": NEW, "layers": NEW_BY_LAYERS, "tensors": 0}[way])))
        self.settings["export"] = {}, "Try --verify layers, which takes less, or --verify tensors."
        weights = weights_of(self.model)
        if self.device.type == "cuda":  # the proof is on the CPU
            held = 0.0
        else:
            largest = max(p.nbytes for p in self.model.parameters())
            process = max(0, self.before - weights)
            held = process + {"full": whole_size(self.model), "layers": 2.0 * largest, "tensors": float(largest)}[way]
        return self._stage("export", 2 * proof + READINGS * self._reading() + self.start, held, disk=weights)


class BenchCosts(StageCosts):
    """The costs of a comparison. models: the base first. Each is timed, on rows as long as those that are asked, or ROW."""

    def __init__(
        self, recipe: Recipe, models: Sequence[PreTrainedModel], tokenizer: PreTrainedTokenizerBase, *, says: bool = False
    ):
        super().__init__(recipe, models[0], tokenizer, says=says)
        with self._doing("counting"):
            self.counted = counts.benching(recipe, self.model, tokenizer, 2 * recipe.bench.batch_size)
        self.row = max(1, min(ROW, self.counted.longest, self.counted.work.largest))
        embeddings: Any = self.model.get_input_embeddings()
        tokens = max(self.row, min(ROW, self.counted.work.largest) // self.row * self.row)
        ids = (torch.arange(tokens) % embeddings.weight.shape[0]).view(-1, self.row).to(self.device)
        with self._doing("timing a forward of each model"):
            self.paces = [forward_pace(model.eval(), ids, memory=True) for model in models]
        self.forward = max(self.paces, key=lambda pace: pace.slowed)

    def bench(self, models: int | None = None) -> Stage:
        """models: how many there are, if more than are open; those take as long as the first."""
        return self._bench([*self.paces, *[self.paces[0]] * ((models or 0) - len(self.paces))], self.counted)

    def tuning(self, name: str, steps: int, seconds: float) -> Stage:
        """A control that is tuned first."""
        return self._stage(f"tune {name}", seconds, 0.0, does={"steps": steps})

    def assumptions(self) -> tuple[str, ...]:
        result = []
        if self.counted.at_most:
            result.append("Writing ends once all answers are written; it is taken to go on as long as it may.")
        if self.counted.longest > self.row:
            result.append(f"Forwards were timed on rows of {self.row:,} tokens; in longer ones attention takes more.")
        return tuple(result)


def started() -> float:
    """The CPU seconds that a fresh process takes to begin: what this one has taken so far, for its imports and to open the
    model, but STARTING at most, since a notebook has done other work before."""
    times = psutil.Process().cpu_times()
    return min(STARTING, times.user + times.system)


def _import_what_a_run_needs() -> None:
    """What stages import when they begin is in memory from then on."""
    import accelerate  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import scipy.optimize  # noqa: F401
