"""run(recipe, out): the whole job, in order. A stage whose file was written with the same settings is read, not done again.

load -> locate -> choose -> splice -> tune -> bench -> export
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from surgery.errors import UserError
from surgery.evaluation.bench import bench
from surgery.evaluation.controls import CONTROLS, PREFIX
from surgery.evaluation.lm_eval import harness_measurements
from surgery.evaluation.suites import Given, measurements
from surgery.exporting.export import check_export, write_export
from surgery.locating.attribution import graft_mixers
from surgery.locating.locate import locate
from surgery.locating.nulls import null_logits
from surgery.models.digests import fingerprint, tokenizer_digest
from surgery.models.load import find_folder, load
from surgery.planning.choose import choose, make_plan, read_plain_text
from surgery.probes import make_probe, training_options
from surgery.probes.question import Question
from surgery.records.plan import Plan
from surgery.records.ranking import Ranking
from surgery.records.recipe import Recipe, read_recipe, recipe_text
from surgery.records.record import Record, provenance
from surgery.records.report import Report
from surgery.records.site import Site
from surgery.report.page import write_report
from surgery.runtime.files import RECIPE, OutputFolder, file_digest, open_output
from surgery.runtime.processes import is_main, on_main
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt, splice
from surgery.tuning.controls import PLANS, SLOW, SLOW_RATE, control_plan, longest_row, narrow, trainable_control
from surgery.tuning.examples import Batches, data_skills
from surgery.tuning.loop import APART, TuningLog, tune
from surgery.tuning.lora import match_targets
from surgery.tuning.text import check_known, knows

R = TypeVar("R", bound=Record)
NULL_ROWS = 16  # of text, on which attribution sets the null keys of all heads
MAIN = "tuned"  # the model that the report is about
UNSEEN = 10_007  # added to the seed: questions by which heads are added are not those that ranked them


def run(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    verify: str = "quick",
) -> Report:
    """Do what a recipe says; the folder `out` then holds ranking.json, plan.json, tuning/, hybrid/ and the report.

    resume: go on with an earlier run in `out`. overwrite: remove it first. verify: of the export, "quick" or "full". Raises
    UserError for input that cannot be used.
    """
    with open_output(out, recipe.input_files(), resume=resume, overwrite=overwrite) as output:
        base, tokenizer = load(
            recipe.model,
            tokenizer=recipe.tokenizer,
            dtype=recipe.dtype,
            device=recipe.device,
            trust_remote_code=trust_remote_code,
        )
        # What every stage depends on: the weights, the contents of files, the seed.
        print_ = fingerprint(base)
        words = tokenizer_digest(tokenizer)
        known = [print_, words, {str(path): file_digest(path) for path in recipe.data_files()}, recipe.seed]
        located = [*known, recipe.locate.model_dump(), recipe.plan.kind, recipe.plan.share, recipe.data.model_dump()]
        planned = [*located, recipe.plan.model_dump(), max(recipe.bench.pairs) if recipe.plan.heads == "auto" else None]
        tuned = [*planned, recipe.tune.model_dump(exclude=APART)]
        tasks = recipe.bench.include_path
        finished = [*tuned, recipe.bench.model_dump(), file_digest(tasks) if tasks and Path(tasks).is_dir() else None]
        last = ("report.json", "hybrid/export.json")
        if not overwrite and on_main(lambda: all(output.is_made(each, finished) for each in last))():
            say(f"{out} is finished; nothing has changed")
            return Report.read(Path(out) / "report.json")
        check_recipe(base, tokenizer, recipe)
        if overwrite:  # not before it is known that the recipe fits
            output.clear()
        if is_main() and not ((kept := output.path / RECIPE).exists() and read_recipe(kept) == recipe):  # it may have comments
            output.write(RECIPE, recipe_text(recipe))
        ranking = once(output, "ranking.json", located, Ranking, partial(locate_heads, base, tokenizer, recipe, print_))
        say(f"locate: {ranking.circuit.sentence if ranking.circuit else f'{ranking.heads[0].site} leads'}")
        plan = once(output, "plan.json", planned, Plan, partial(choose_plan, base, tokenizer, ranking, recipe, print_))
        say(f"plan: attention at {', '.join(map(str, plan.sites))}")
        models, trained = make_models(base, tokenizer, ranking, plan, recipe)
        logs = {name: _tune(models, name, tokenizer, recipe, output, tuned) for name in trained}
        return on_main(_finish)(models, logs, tokenizer, ranking, plan, recipe, output, finished, verify)


def check_recipe(base: Any, tokenizer: Any, recipe: Recipe) -> None:
    """Raise UserError, before any work, for what a later stage could not do: sites and modules that the model lacks, and text,
    examples and questions that cannot be made."""
    if any(not entry.get("of_base") for entry in getattr(base.config, "grafts", None) or ()):
        raise UserError(f"{recipe.model} is a hybrid already; give its base")
    kind = recipe.plan.kind
    layer = next(iter(graft_mixers(adopt(base))), 0)  # of a model that has none, splice says why it cannot be grafted
    sites = recipe.plan.sites or (Site(layer, (0,) if kind == "head" else ()),)
    splice(base, Plan(kind=kind, sites=sites, width=recipe.plan.width))
    if kind == "head" and recipe.plan.share is not None:
        check_known(recipe.data.train_text, tokenizer)
    if recipe.plan.keep_skills and not data_skills(recipe.data):
        raise UserError("plan.keep_skills needs other skills; data.skills names none")
    if recipe.plan.donor:
        find_folder(recipe.plan.donor)
    few = recipe.model_copy(update={"locate": recipe.locate.model_copy(update={"examples": 2})})
    ask_about(tokenizer, few, recipe.seed)
    check_tuning(base, tokenizer, recipe)
    check_bench(tokenizer, recipe)


def check_tuning(model: Any, tokenizer: Any, recipe: Recipe) -> None:
    """Raise UserError for modules that a model lacks, and for examples and text that cannot be made."""
    if recipe.tune.lora:
        match_targets(adopt(model), recipe.tune.lora)
    Batches(tokenizer, recipe.tune, recipe.data, recipe.seed)


def check_bench(tokenizer: Any, recipe: Recipe) -> list[str]:
    """The names of all measurements. Raises UserError for questions, texts and tasks that cannot be measured."""
    if "copy_cache" in recipe.bench.controls:
        check_known(recipe.data.train_text, tokenizer)
    given = Given(tokenizer, recipe.bench.model_copy(update={"limit": 2}), recipe.data, recipe.seed)
    return [each.name for each in (*measurements(given), *harness_measurements(given))]


def once(output: OutputFolder, name: str, settings: Any, kind: type[R], compute: Callable[[], R]) -> R:
    """What a stage's file holds, if it was written with the same settings; computed and written otherwise."""

    def work() -> R:
        if output.is_made(name, settings):
            return kind.read(output.path / name)
        result = compute()
        output.write(name, result.text(), settings)
        return result

    return on_main(work)()


def ask_unseen(tokenizer: Any, recipe: Recipe) -> list[Question]:
    """Questions that the ranking has not seen, where a plan needs some. Whether another head helps is asked with dictionaries
    of the size that the verdict is about, where there is most to gain."""
    if recipe.plan.heads != "auto":
        return ask_about(tokenizer, recipe, recipe.seed + UNSEEN) if recipe.plan.keep_skills else []
    more = {"pairs": max(recipe.bench.pairs)} if recipe.locate.probe == "kv" else {}
    return ask_about(tokenizer, recipe, recipe.seed + UNSEEN, **more)


def ask_about(tokenizer: Any, recipe: Recipe, seed: int, **more: Any) -> list[Question]:
    """The questions of recipe.locate. more: other options of its probe."""
    options = recipe.locate
    probe = make_probe(options.probe, tokenizer, **training_options(options.probe, options.options | more))
    return probe.questions(options.examples, seed)


def locate_heads(base: Any, tokenizer: Any, recipe: Recipe, print_: str) -> Ranking:
    """Stage locate: the ranking of the heads, by grafts as the plan will have them. print_: the base's fingerprint."""
    nulls, adopted = None, adopt(base)
    share = recipe.plan.share if recipe.plan.kind == "head" and graft_mixers(adopted) else None
    if share is not None and not knows(recipe.data.train_text, tokenizer):
        say("locate: data.train_text holds no text of the kind that the model knows, so heads are ranked without null keys")
    elif share is not None:
        nulls = null_logits(adopted, read_plain_text(tokenizer, recipe.data, NULL_ROWS, recipe.seed), share)
    ranking = locate(base, tokenizer, ask_about(tokenizer, recipe, recipe.seed), recipe.locate, nulls=nulls)
    return ranking.model_copy(update={"provenance": provenance(recipe.model, print_, recipe.seed, recipe.public())})


def choose_plan(base: Any, tokenizer: Any, ranking: Ranking, recipe: Recipe, print_: str) -> Plan:
    """Stage choose: the plan. print_: the base's fingerprint."""
    unseen = ask_unseen(tokenizer, recipe)
    plan = choose(base, tokenizer, ranking, recipe.plan, recipe.data, seed=recipe.seed, questions=unseen)
    return plan.model_copy(update={"provenance": provenance(recipe.model, print_, recipe.seed, recipe.public())})


def make_models(base: Any, tokenizer: Any, ranking: Ranking, plan: Plan, recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """(the models by name, the base first, then the hybrid untrained and to be tuned, then controls; which are to be tuned)."""
    models = {"base": base, "spliced": splice(base, plan), MAIN: splice(base, plan)}
    starts = {name: each.start for each in ranking.heads for name in each.site.head_names}
    trained = [MAIN]
    for control in recipe.bench.controls:
        if not CONTROLS[control].trained:
            continue
        name = f"{PREFIX}{control}"
        if control in PLANS:
            other = control_plan(control, base, plan, recipe.seed)
            if other.kind == "head":  # starts and null keys by the same measurements as the plan's own
                asked = ask_unseen(tokenizer, recipe) if recipe.plan.keep_skills else ()
                other = make_plan(base, tokenizer, other.sites, starts, recipe.plan, recipe.data, recipe.seed, questions=asked)
            models[name] = splice(base, other)
            if control == "window":
                batches = Batches(tokenizer, recipe.tune, recipe.data, recipe.seed)
                narrow(models[name], models[MAIN], longest_row(batches))
        else:
            models[name] = trainable_control(base, plan, control)
        trained.append(name)
    return models, trained


def _tune(models: dict[str, Any], name: str, tokenizer: Any, recipe: Recipe, output: OutputFolder, settings: Any) -> TuningLog:
    """Stage tune, of one model, from the newest checkpoint on."""
    teacher, options = models["base"] if name != MAIN else None, recipe.tune
    if name != MAIN and name.removeprefix(PREFIX) in SLOW:
        most = SLOW_RATE / models[name].config.get_text_config().hidden_size ** 0.5
        options = options.model_copy(update={"learning_rate": min(options.learning_rate, most)})
    with output.folder(f"tuning/{name}", settings) as folder:
        on_main(lambda: None)()  # the others wait until it has made the folder
        log = tune(models[name], tokenizer, options, recipe.data, seed=recipe.seed, folder=folder, name=name, teacher=teacher)
    if options.steps != "auto":  # else tune says what became of it
        say(f"tuning {name}: {len(log.steps)} steps")
    return log


def _finish(
    models: dict[str, Any],
    logs: dict[str, TuningLog],
    tokenizer: Any,
    ranking: Ranking,
    plan: Plan,
    recipe: Recipe,
    output: OutputFolder,
    settings: Any,
    verify: str,
) -> Report:
    """Stages bench and export. logs: what stage tune returned, by model."""
    with output.folder("measured") as folder:
        report = bench(
            models,
            tokenizer,
            recipe.bench,
            data=recipe.data,
            seed=recipe.seed,
            main=MAIN,
            folder=folder,
            base_name=recipe.model,
            recipe=recipe.public(),
            trained={name: log.trained for name, log in logs.items()},
            back_to={name: log.back_to for name, log in logs.items() if log.back_to is not None},
        )
    say(f"bench: {len(report.models)} models in {len(report.measurements)} measurements")
    with output.new_folder(".", settings, keep=True) as folder:
        write_report(report, folder, hybrid="hybrid", ranking=ranking)
    check_export(models[MAIN], "hf", verify, report)
    with output.new_folder("hybrid", settings) as folder:
        proof = write_export(
            models[MAIN],
            tokenizer,
            folder,
            output.path / "hybrid",
            plan=plan,
            report=report,
            base=recipe.model,
            verify=verify,
        )
    say(f"export: {proof}")
    return report
