"""The main job once through: locate, plan, splice, tune, bench, export. One recipe in, one folder out.

Every stage leaves its result in the folder. With `resume`, a stage whose result is there and of the same settings is not
repeated, a tuning goes on from its last checkpoint, and a finished cell of the bench is not measured again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.evaluation import markdown
from surgery.evaluation.bench import measure
from surgery.evaluation.entries import Entry
from surgery.evaluation.report import Report
from surgery.evaluation.results import Located
from surgery.evaluation.suites import try_out
from surgery.evaluation.views import MeasuredModels
from surgery.exporting.export import check_space, export
from surgery.exporting.folder import RECORD, Exported
from surgery.exporting.verifications import check_way
from surgery.families import family_of
from surgery.jobs.entries import entries_of
from surgery.jobs.locating_stage import RANKING, located
from surgery.jobs.observer import Observer
from surgery.jobs.opening import open_base, open_donor
from surgery.jobs.output_folder import begin, check_folder, withdrawn_if_refused
from surgery.jobs.planning_stage import KEPT, planned
from surgery.jobs.preparing import check, check_run, name_texts
from surgery.jobs.report_folder import REPORT, describe, write_report
from surgery.jobs.stages import first_change
from surgery.jobs.tuning_stage import steps_of, tuned
from surgery.kernels.dispatch import use
from surgery.loading.opened import Checkpoint, a_type
from surgery.locating.questions import probe_in_words
from surgery.locating.ranking import Ranking
from surgery.locating.subject import Subject
from surgery.records.names import strip_paths
from surgery.records.plan import PLAN, Plan, published
from surgery.records.recipe import Recipe
from surgery.records.record import provenance, write_text
from surgery.records.site import shortened
from surgery.runtime.memory import measured as measured_memory
from surgery.runtime.memory import size, trim
from surgery.runtime.processes import on_main
from surgery.runtime.progress import busy, duration, say
from surgery.runtime.timing import Stopwatch, processor_seconds
from surgery.splicing.splice import adopt, ungrafted
from surgery.statistics import at_chance
from surgery.tuning.lora import matches
from surgery.tuning.plateau import taken
from surgery.tuning.state import Log

LONG = 300.0  # seconds of work that are not spent on heads that mean nothing, unless told to


@withdrawn_if_refused
def run(
    recipe: Recipe, out: str | Path, *, verify: str = "auto", resume: bool = False, overwrite: bool = False,
    trust_remote_code: bool = False, papers: Mapping[str, str] | None = None, anyway: bool = False,
    observe: type[Observer] = Observer,
) -> Report:  # fmt: skip
    """Do everything. Writes into `out`: ranking.json, atlas.png, mixing.png, plan.json, report.json, report.md, report.html,
    mixing.json, grafts.png, retrieval.png, cost.png, the tuning logs, and hybrid/, the exported checkpoint.

    observe: who is told of the stages, and knows what work is left; surgery.run has one who says what they will cost. All else
    is as surgery.run takes it (costs/run.py). Raises UserError, and writes nothing, where an earlier run is there and neither
    `resume` nor `overwrite` is given, or where the disk has no room for the export.
    """
    if not isinstance(recipe, Recipe):
        raise UserError(f"surgery.run takes a recipe, as surgery.read_recipe returns it, not {a_type(recipe)}")
    out = Path(out)
    check_way(verify)
    on_main(partial(check_folder, out, "run", resume=resume, overwrite=overwrite))
    with use(**recipe.kernels):
        with busy("opening the model"):
            base = open_base(recipe, trust_remote_code)
        family_of(base.model.config)  # before the work begins: nothing else can be grafted
        check(recipe, base)
        check_run(recipe, base)
        try_out(recipe.bench)
        if recipe.tune.lora is not None:
            matches(ungrafted(base.model), recipe.tune.lora)  # attention layers that the base brought can have adapters, too
        earlier = begin(out, "run", recipe, resume=resume, overwrite=overwrite)
        name_texts(recipe, base.tokenizer)
        change = first_change(earlier, recipe) if earlier else None
        if change is not None:
            say(str(change))
        for name, content in (papers or {}).items():
            on_main(partial(write_text, out / name, content))
        enough = partial(on_main, partial(check_space, "hf", base.model, out))
        if not (resume and (out / "hybrid" / RECORD).exists()):  # of a run that may be finished, nothing may be left to write
            enough()
        job = _Job(recipe, out, base, resume, verify, observe)
        ranking = job.locate()
        if not anyway:
            job.check_chance(ranking)
        chosen = job.plan(ranking)
        if resume and (report := on_main(partial(job.finished, chosen))) is not None:
            say(f"nothing has changed, and everything is finished: this is the result in {out}")
            return report
        enough()
        entries = entries_of(base.model, recipe, ranking, chosen, partial(open_donor, chosen, trust_remote_code), job.tune)
        return job.finish(ranking, chosen, entries)


class _Job:
    def __init__(self, recipe: Recipe, out: Path, base: Checkpoint, resume: bool, verify: str, observe: type[Observer]):
        self.recipe, self.out, self.base, self.resume, self.verify = recipe, out, base, resume, verify
        self.settings = strip_paths(recipe.model_dump(mode="json"))
        with busy("reading the weights"):
            self.subject = Subject.of(base, known_fingerprint=base.fingerprint)
            self.conditions = self.subject.conditions
        self.timings: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self.observer = observe(recipe, base, out, verify)
        self.training: dict[str, dict[str, float]] = {}
        self.log: Log = []

    @contextmanager
    def stage(self, name: str, announcement: str | None = None) -> Iterator[None]:
        """Say what a stage will cost and do (or leave that to it), and what it took."""
        self.observer.starts(name)
        if announcement is not None:
            say(announcement)
        watch, cpu = Stopwatch(self.base.model.device), processor_seconds()
        self.cpu.setdefault("start", round(cpu, 2))
        trim()  # what the stage before has freed is no part of this one's memory
        with measured_memory() as peak:
            yield
        work, wall = watch.read()
        self.timings[name] = round(wall, 2)
        self.cpu[name] = round(processor_seconds() - cpu, 2)
        self.observer.ended(name, work, wall)
        self.memory[name] = peak.device or peak.total
        say(f"{name}: done in {duration(self.timings[name])}, peak memory {size(self.memory[name])}")

    def locate(self) -> Ranking:
        if self.resume and (self.out / RANKING).exists():
            return located(self.recipe, self.base, self.out, resume=True, subject=self.subject)
        with self.stage("locate"):
            return located(self.recipe, self.base, self.out, resume=self.resume, subject=self.subject)

    def check_chance(self, ranking: Ranking) -> None:
        """Raise UserError where heads were located by guesses, and much work would follow that has not begun."""
        if ranking.chance is None or not at_chance(ranking.base_accuracy, ranking.chance) or (self.out / "tuning").exists():
            return
        if self.observer.work_after("locate") > LONG:
            left = self.observer.time_after("locate")
            raise UserError(
                f"the base is at chance on the locating probe ({ranking.base_accuracy}, chance {ranking.chance:.3f}), so the "
                f"ranking means nothing, and about {duration(left)} of work would follow: choose an easier probe "
                "(locate.options), or go on with --resume --anyway"
            )

    def plan(self, ranking: Ranking) -> Plan:
        options = self.recipe.plan
        if options.opens:
            what = f"adding heads to the plan while each saves {options.auto.least_gain:g} nats or more"
            if options.kind == "window":
                what = "measuring how many windows keep what questions and text need"
            elif not options.measures and options.state_size is not None:
                what = f"measuring which {options.state_size} dimensions of the state text needs most"
            elif options.by != "gain":
                what = f"choosing {'at most ' if options.grows else ''}{options.counted} heads by {options.by}"
            with self.stage("plan", what):
                chosen = planned(self.recipe, self.base, ranking, self.out / KEPT)
        else:
            chosen = planned(self.recipe, self.base, ranking)
        on_main(partial(chosen.write, self.out / PLAN))
        gate = "" if chosen.blend is None else f", under a gate of {chosen.blend:g}"
        say(f"plan: {'attention at ' * bool(chosen.sites)}{markdown.sites_text(chosen)}{gate}")
        for skill, heads in chosen.at_risk.items():
            say(f"plan: at risk: {skill}, which grafts without a gate at {', '.join(heads)} cost the base")
        return chosen

    def finished(self, chosen: Plan) -> Report | None:
        """The report in the folder, if it is of the same settings, plan, weights, kernels and code, and its hybrid is there."""
        record = self.out / "hybrid" / RECORD
        if not ((self.out / REPORT).exists() and record.exists()):
            return None
        try:
            report, exported = Report.read(self.out / REPORT, unsealed="refuse"), Exported.read(record, unsealed="refuse")
        except UserError:  # damaged, or of another version
            return None
        measured = {name: model.conditions for name, model in report.models.items()}
        if "base" not in measured or "tuned" not in measured:
            return None
        base, hybrid = measured["base"], measured["tuned"]
        same = report.provenance.recipe == self.settings and report.plan == published(chosen)
        same = same and base == self.conditions and hybrid is not None and hybrid.model == exported.digest
        return report if same else None

    def tune(self, name: str, model: PreTrainedModel, chosen: Plan, layers: list[int] | None = None) -> PreTrainedModel:
        # The controls learn as long as the tuned model, with the same learning rates.
        options = taken(self.recipe.tune, self.log) if self.log else self.recipe.tune
        what = f"the grafts at {shortened(chosen.sites)}" if chosen.sites else "adapters beside windows"
        if layers is not None:
            what = "the base's own layers" if layers else "adapters alone"
        work = f"{steps_of(options)} of {options.batch_size} sequences and {options.text_batch_size} texts"
        with self.stage(f"tune {name}", f"tuning {name}, {what}: {work}"):
            log = tuned(
                model, self.base, self.recipe.model_copy(update={"tune": options}), self.out / "tuning" / name,
                plan=chosen if layers is None else None, layers=layers,
                teacher=adopt(self.base.model), resume=self.resume, description=name, digest=self.conditions.model,
            )  # fmt: skip
        self.log = self.log or log  # the tuned model comes first
        end = log[-10:]
        self.training[name] = {key: sum(r[key] for r in end) / len(end) for key in ("loss", "retrieval", "kl") if end}
        if self.recipe.tune.steps == "auto":
            self.training[name]["steps"] = len(log)
        on_main(partial(write_text, self.out / "tuning" / f"{name}.csv", _csv(log)))
        return model

    def finish(self, ranking: Ranking, chosen: Plan, entries: dict[str, Entry]) -> Report:
        recipe = self.recipe
        with self.stage("bench", f"measuring {len(entries)} models: {', '.join(entries)}"):
            measured = measure(
                entries, self.base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=self.out / "cells",
            )  # fmt: skip
        report = Report(
            provenance=provenance(self.base.name, self.base.fingerprint, recipe.seed, self.settings),
            plan=published(chosen),
            located=_located(ranking),
            models=measured,
            timings=self.timings,
            cpu=self.cpu,
            memory=self.memory,
            training=self.training,
            settings=self.settings["bench"],
        )
        return on_main(partial(self.write, report, chosen, entries))

    def write(self, report: Report, chosen: Plan, entries: dict[str, Entry]) -> Report:
        """The report, the hybrid, and the report once more with all times in it."""
        recipe, hybrid = self.recipe, entries["tuned"].model
        with busy("drawing the report"):  # before the export, which takes report.html along
            write_report(MeasuredModels(report, self.base, entries, recipe), self.out)
        with (
            self.stage("export", "exporting the tuned hybrid, and comparing it, reloaded, with the live one"),
            busy("export"),
        ):
            export(
                hybrid, self.out / "hybrid", tokenizer=self.base.tokenizer, plan=chosen, base=self.base.name, recipe=recipe,
                report=report, figures=self.out, verify=self.verify,
            )  # fmt: skip
        report = report.model_copy(update={"timings": self.timings, "cpu": self.cpu, "memory": self.memory})
        describe(report, self.out)
        return report


def _located(ranking: Ranking) -> Located | None:
    """What the report says of the probe that ranked the heads."""
    if ranking.chance is None:
        return None
    probe = probe_in_words(ranking.probe["name"], ranking.probe["options"])
    return Located(probe=probe, accuracy=ranking.base_accuracy, chance=ranking.chance)


def _csv(log: Log) -> str:
    """One line a record; what one of them does not have is left empty."""
    names = dict.fromkeys(name for record in log for name in record)
    lines = [names, *([f"{record[name]:g}" if name in record else "" for name in names] for record in log)]
    return "".join(",".join(line) + "\n" for line in lines)
