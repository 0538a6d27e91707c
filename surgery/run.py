"""The main job once through: locate, plan, splice, tune, export, bench. One recipe in, one folder out.

Every stage leaves its result in the folder; with `resume`, a stage whose result is there is not repeated, a tuning continues
from its last checkpoint, and a finished cell of the bench is not measured again.
"""

import copy
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from surgery.bench import bench, harness, html, markdown
from surgery.bench.bench import Entry
from surgery.bench.mixing import Mixing, mixing
from surgery.bench.plots import draw
from surgery.bench.report import Report
from surgery.bench.suites import check_probes, standard
from surgery.checkpoint import Checkpoint, load
from surgery.digests import conditions
from surgery.errors import UserError
from surgery.export import export
from surgery.families import family_of
from surgery.kernels.dispatch import Operation, asked_for, use
from surgery.locate import Ranking, locate, plan, random_plan
from surgery.locate.atlas import draw_atlas, short_question
from surgery.locate.questions import ask_all, check_questions, described, questions_digest
from surgery.names import called, on_hub, public
from surgery.plan import Plan, published
from surgery.probes.knowledge import PARTS, Knowledge, Letters, Part
from surgery.probes.perplexity import Perplexity
from surgery.processes import on_main, own_device
from surgery.progress import say
from surgery.recipe import Recipe, changed
from surgery.records import provenance, read_text, write_text
from surgery.splice import adopt, check_sites, splice
from surgery.tune import batches, tune
from surgery.tune.lora import matches
from surgery.tune.state import Log

RECIPE, RANKING = "recipe.yaml", "ranking.json"


def open_checkpoint(recipe: Recipe, trust_remote_code: bool = False, base: str | None = None) -> Checkpoint:
    """Load the recipe's model onto its device, and see that the kernels which were asked for can serve it. base: of a patch, if
    not where it says."""
    device = recipe.device
    if device == "auto":
        device = own_device() or ("cuda" if torch.cuda.is_available() else "cpu")
    found = load(
        recipe.model,
        tokenizer=recipe.tokenizer,
        dtype=recipe.dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        base=base,
    )
    with use(**recipe.kernels):
        for operation in map(Operation.registry.__getitem__, asked_for()):
            operation.choose(*operation.example(found.model.device, found.model.dtype))
    return found


def in_dtype_of(plan: Plan, recipe: Recipe) -> Recipe:
    """The recipe, opening its model as the plan's ranking did: a dtype is said once, unless the recipe says one itself."""
    return recipe if "dtype" in recipe.model_fields_set else recipe.model_copy(update={"dtype": plan.dtype})


def open_beside(base: Checkpoint, name: str, recipe: Recipe, trust_remote_code: bool = False) -> Checkpoint:
    """Another model, to be asked what `base` is asked. Raises UserError if its tokenizer is another."""
    other = open_checkpoint(recipe.model_copy(update={"model": name}), trust_remote_code)
    if other.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise UserError(f"{name} has another tokenizer than {base.name}; their examples would not be the same")
    return other


def open_donor(plan: Plan, trust_remote_code: bool = False) -> PreTrainedModel | None:
    """The model that a plan's grafts start from, if it names one."""
    return None if plan.donor is None else load(plan.donor, trust_remote_code=trust_remote_code).model


def run(recipe: Recipe, out: Path, *, resume: bool = False, trust_remote_code: bool = False) -> Report:
    """Do everything. Writes into `out`: ranking.json, atlas.png, mixing.png, plan.json, report.json, report.md, report.html,
    mixing.json, retrieval.png, cost.png, the tuning logs, and hybrid/, the exported checkpoint. Processes that accelerate
    started share the work."""
    with use(**recipe.kernels):
        base = open_checkpoint(recipe, trust_remote_code)
        family_of(base.model.config)  # before the work begins: nothing else can be grafted
        check(recipe, base)
        if recipe.tune.lora is not None:
            matches(adopt(base.model), recipe.tune.lora)
        on_main(partial(prepare, out, recipe, resume))
        job = _Job(recipe, out, base, resume)
        ranking = job.locate()
        chosen = job.plan(ranking)
        job.donor = open_donor(chosen, trust_remote_code)
        entries = job.models(ranking, chosen)
        return job.finish(ranking, chosen, entries)


def located(recipe: Recipe, base: Checkpoint, out: Path, *, resume: bool = False, figures: bool = True) -> Ranking:
    """Locate, and write ranking.json into `out`, with `figures` also atlas.png and mixing.png. What is measured is kept in
    out/locate until then: with `resume`, nothing of it is measured again, and a ranking that is there is only read, if it is of
    these weights and questions, by the same kernels and code. Of several processes, the main one writes.

    Raises UserError for a ranking, or a part of one, that is not as it was measured."""
    path, kept, settings = out / RANKING, out / "locate", public(recipe.model_dump(mode="json"))

    def there() -> Ranking | None:
        if not resume:
            shutil.rmtree(kept, ignore_errors=True)
        if not resume or not path.exists():
            return None
        earlier = Ranking.read(path, unsealed="refuse")
        if (other := _outdated(earlier, recipe, base, settings)) is not None:
            say(f"{path} is of another {other}: locating again")
            return None
        return earlier

    if (done := on_main(there)) is not None:
        return done
    ranking = locate(
        base.model, base.tokenizer, **recipe.locate.model_dump(), seed=recipe.seed, name=base.name, recipe=settings, kept=kept
    )

    def write() -> None:
        if figures:
            draw_atlas(base.model, base.tokenizer, ranking, out)
        ranking.write(path)
        shutil.rmtree(kept, ignore_errors=True)

    on_main(write)
    return ranking


def _outdated(ranking: Ranking, recipe: Recipe, base: Checkpoint, settings: dict[str, Any]) -> str | None:
    """What a ranking depends on that is not the same now; None if all of it is."""
    if ranking.provenance.recipe != settings:
        return "recipe"
    now = conditions(base.model, base.tokenizer)
    if ranking.conditions is None or (other := ranking.conditions.differs(now)) is not None:
        return other if ranking.conditions is not None else "version"
    options = recipe.locate.model_dump(exclude={"probe", "options", "exact", "confirm", "layers"})
    asked_now = ask_all(
        base.tokenizer, recipe.locate.probe, recipe.locate.options, seed=recipe.seed, device=base.model.device, **options
    )
    return None if ranking.questions == questions_digest(asked_now) else "set of questions"


def compare(recipe: Recipe, others: list[str], out: Path, *, resume: bool = False, trust_remote_code: bool = False) -> Report:
    """Bench the recipe's model against `others` on the same examples. Writes report.json, report.md, report.html and
    figures into `out`."""
    recipe, base, beside = open_compared(recipe, others, trust_remote_code)
    entries = {"base": Entry(base.model, called(base.name))}
    part: Part | None = (
        "bench" if recipe.tune.keep is not None or any(map(_tuned_under_keep, (recipe.model, *others))) else None
    )
    for label, other in beside.items():
        found = Path(other.name) / "plan.json"
        entries[label] = Entry(other.model, called(other.name), Plan.read(found) if found.exists() else None)
    check(recipe, base)
    on_main(partial(prepare, out, recipe, resume))
    with use(**recipe.kernels):
        measured = bench(
            entries, base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=out / "cells", part=part
        )
    settings = public(recipe.model_dump(mode="json"))
    made = provenance(base.name, base.fingerprint, recipe.seed, settings)
    report = Report(provenance=made, plan=None, models=measured, timings={}, training={}, settings=settings["bench"])
    example = short_question(base.tokenizer, recipe.locate.probe, recipe.locate.options, recipe.seed)
    on_main(lambda: write_report(report, out, mixing(entries, base.tokenizer, example, made)))
    return report


def open_compared(
    recipe: Recipe, others: list[str], trust_remote_code: bool = False
) -> tuple[Recipe, Checkpoint, dict[str, Checkpoint]]:
    """The recipe's model and, by label, the others; and the recipe that opened them. Precision alone changes answers, so unless
    the recipe says a dtype, models that are stored in several are all opened in that of the first of the others."""
    base = open_checkpoint(recipe, trust_remote_code)
    named = list(labels(others).items())[1:]
    beside = {label: open_beside(base, name, recipe, trust_remote_code) for label, name in named}
    dtypes = [str(found.model.dtype).removeprefix("torch.") for found in (*beside.values(), base)]
    if "dtype" in recipe.model_fields_set or len(set(dtypes)) == 1:
        return recipe, base, beside
    say(f"the models are stored in {' and '.join(sorted(set(dtypes)))}; all are compared in {dtypes[0]}, unless dtype is set")
    del base, beside  # or all would be held twice
    return open_compared(changed(recipe, dtype=dtypes[0]), others, trust_remote_code)


def labels(others: list[str]) -> dict[str, str]:
    """What a comparison calls its models -> their names: the base, then each by its folder; where two share that, the second by
    the folder above it as well, or with a number."""
    labelled: dict[str, str] = {"base": ""}
    for name in others:
        if Path(name) in map(Path, list(labelled.values())[1:]):
            raise UserError(f"{name} is there twice; give each model once")
        place = Path(name if on_hub(name) else os.path.abspath(name))
        candidates = chain((place.name, "/".join(place.parts[-2:])), (f"{place.name}_{i}" for i in count(2)))
        labelled[next(label for label in candidates if label not in labelled)] = name
    return labelled


def _tuned_under_keep(folder: str) -> bool:
    """Whether a hybrid's folder says so."""
    written = Path(folder) / RECIPE
    try:
        made = yaml.safe_load(read_text(written, "the recipe")) if written.exists() else None
    except yaml.YAMLError as error:
        raise UserError(f"{written} is not YAML: {' '.join(str(error).split())}") from error
    tuning = made.get("tune") if isinstance(made, dict) else None
    return isinstance(tuning, dict) and tuning.get("keep") is not None


def write_report(report: Report, out: Path, matrices: Mixing | None) -> None:
    """report.json, report.md, report.html (with the atlas of a ranking that lies there) and their figures."""
    draw(report, out)
    if matrices is not None:
        matrices.write(out / "mixing.json")
    describe(report, out, matrices)


def describe(report: Report, out: Path, matrices: Mixing | None) -> None:
    """The report itself, without its figures."""
    ranking = Ranking.read(out / RANKING) if (out / RANKING).exists() else None
    weights = next(iter(report.models.values())).conditions
    if ranking is not None and ranking.conditions and weights and ranking.conditions.model != weights.model:
        ranking = None  # of another model, whose atlas this is not
    write_text(out / "report.md", markdown.render(report))
    write_text(out / "report.html", html.render(report, ranking, matrices))
    report.write(out / "report.json")


def check(recipe: Recipe, base: Checkpoint) -> None:
    """Find out before the work begins whether its inputs are there."""
    if recipe.bench.doses and recipe.plan.kind != "head":
        raise UserError(f"bench.doses counts heads, and plan.kind is {recipe.plan.kind}")
    if wanted := standard(recipe.bench):
        harness.load(wanted, recipe.bench.tasks_path, recipe.bench.data_path)
    check_probes(recipe.bench, base.tokenizer)
    check_questions(base.tokenizer, recipe.locate, recipe.seed)
    check_sites(base.model, recipe.plan.sites or ())
    Knowledge(recipe.data.facts).questions(1, seed=0)
    Letters(recipe.data.facts).questions(1, seed=0)
    Perplexity(recipe.data.held_out_text, 1, recipe.bench.window).token_windows(base.tokenizer, seed=0)
    batches.check(base.tokenizer, recipe.tune, recipe.data, recipe.bench, recipe.seed)


def prepare(out: Path, recipe: Recipe, resume: bool) -> None:
    """Make the output folder, and see that a resumed run is the same run."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    written = out / RECIPE
    if resume and written.exists() and written.read_text() != text:
        raise UserError(f"{out} holds a run of another recipe; run without --resume or choose another --out")
    if not resume and out.exists() and any(out.iterdir()) and not written.exists():
        raise UserError(f"{out} exists and is no earlier run; choose another --out")
    write_text(written, text)


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
            measured = bench(
                entries, self.base.tokenizer, recipe.bench, data=recipe.data, seed=recipe.seed, cells=self.out / "cells",
                part=None if recipe.tune.keep is None else "bench",
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
    if recipe.tune.keep is None or recipe.data.facts == "world":
        return ""
    kept, measured = (len(Knowledge(recipe.data.facts, part).questions(sys.maxsize, seed=0)) for part in PARTS)
    return f"; tune.keep asked {kept} of the {kept + measured} facts, bench the other {measured}"


def _csv(log: Log) -> str:
    """One line a record; what one of them does not have is left empty."""
    names = dict.fromkeys(name for record in log for name in record)
    lines = [names, *([_figure(record.get(name, "")) for name in names] for record in log)]
    return "".join(",".join(line) + "\n" for line in lines)


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
