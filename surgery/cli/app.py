"""The command line: parses, calls, prints. What a verb does is in the module of its name."""

import json
import sys
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

import surgery
from surgery.doctor.benchmark import GROUPS, Benchmark, benchmark
from surgery.doctor.diagnosis import Diagnosis, diagnose
from surgery.doctor.rehearsal import Rehearsal, rehearse
from surgery.doctor.tables import cell_rows, describe, verdict_rows
from surgery.evaluation import markdown
from surgery.evaluation.gate import requirement
from surgery.evaluation.harness import TASKS
from surgery.evaluation.report import Report
from surgery.evaluation.suites import names
from surgery.exporting.export import FORMATS
from surgery.exporting.publish import publish as send
from surgery.exporting.source import base_of, holds_base, is_patch, papers_of, report_on, there
from surgery.jobs.comparison import compare
from surgery.jobs.locating_stage import located
from surgery.jobs.opening import in_dtype_of, labels, open_checkpoint, open_donor
from surgery.jobs.preparing import prepare
from surgery.kernels.dispatch import KernelError, ask
from surgery.loading.checkpoint import plan_of
from surgery.locating.locate import check_locatable
from surgery.locating.prune import prune as cut_down
from surgery.locating.questions import check_questions, choice_probe
from surgery.locating.ranking import Ranking
from surgery.models.anatomy import anatomy
from surgery.pretraining.pretrain import pretrain as train_base
from surgery.probes.knowledge import Knowledge
from surgery.records.plan import Plan
from surgery.records.pretrain_recipe import read_pretrain_recipe
from surgery.records.recipe import Recipe, read_recipe
from surgery.runtime.processes import is_main, on_main
from surgery.splicing.splice import check_base
from surgery.studies.conduct import FIGURE, FINDINGS, conduct
from surgery.tuning import batches
from surgery.tuning.lora import matches
from surgery.tuning.shards import divided
from surgery.tuning.trackers import check_trackers

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
        "Finds the retrieval heads of a pretrained Mamba and splices attention in their place: "
        "locate, plan, splice, tune, export, bench. `run` does all of it from one recipe."
    ),
)  # fmt: skip

ModelArgument = Annotated[str, typer.Argument(help="Hub id, Hugging Face folder, original state-spaces folder, or patch.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, e.g. tune.steps=300.")
]
RecipeOption = Annotated[Path | None, typer.Option("--recipe", help="A recipe to take the settings from.")]
Out = Annotated[Path | None, typer.Option("--out", help="Where the output goes.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow code that comes with the checkpoint to run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]


@app.command()
def run(
    recipe: Path, out: Out = None, settings: Settings = None, resume: Resume = False, trust_remote_code: Trust = False
) -> None:
    """Do everything that a recipe says: the main job, or a study; output to runs/<recipe>."""
    out = out or Path("runs") / recipe.stem
    options = _recipe(recipe, settings)
    if options.study is not None:
        findings = conduct(options, out, resume=resume, trust_remote_code=trust_remote_code)
        _table(*findings.table())
        _print(f"{findings.summary}\nFindings: {out / FINDINGS}, figure: {out / FIGURE}")
        return
    report = surgery.run(options, out, resume=resume, trust_remote_code=trust_remote_code)
    _table(*markdown.rows(report))
    _print(markdown.EXPLANATION + "\n")
    for name, model in report.models.items():
        sites = f" ({markdown.places(model.plan)})" if model.plan else ""
        _print(f"{name}: {model.description}{sites}")
    _print(f"\nReport: {out / 'report.html'} (and .md, .json)\nHybrid: {out / 'hybrid'}")


@app.command()
def locate(
    model: ModelArgument,
    recipe: RecipeOption = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    trust_remote_code: Trust = False,
) -> None:
    """Rank every head: ranking.json, atlas.png and mixing.png in --out (runs/locate-<model>). Settings: locate.examples=512,
    locate.probe=mqar, locate.options.pairs=16, locate.seeds=3 (is the ranking stable?), ... Processes started by `accelerate
    launch` share the work."""
    options = _recipe(recipe, settings, model=model)
    base = open_checkpoint(options, trust_remote_code)
    check_locatable(base.model, options.locate.exact)
    out = out or Path("runs") / f"locate-{Path(model).name}"
    check_questions(base.tokenizer, options.locate, options.seed)
    on_main(partial(prepare, out, options, resume))
    ranking = located(options, base, out, resume=resume)
    scores = ("splice_gain", "splice_loss", "attribution", "ablation_drop", "ablation_loss", "answer_mass")
    fields = [f for f in scores if any(getattr(s, f) is not None for s in ranking.heads[:10])]
    if "splice_gain" in fields and "ablation_drop" in fields:
        fields.remove("ablation_drop")  # too wide a table
    body = [[str(s.site), s.kind or "", s.role or "", *(str(getattr(s, f) or "") for f in fields)] for s in ranking.heads[:10]]
    names = ("attribution (a slope)" if f == "attribution" else f.replace("_", " ") for f in fields)
    _table(["site", "kind", "role", *names], body)
    if ranking.stability is not None:
        _table(*ranking.stability.table())
        _print(ranking.stability.summary())
    accuracy = str(ranking.base_accuracy).replace("+", "")  # signs are for differences
    _print(f"Layers: {anatomy(base.model).kinds()}. Base accuracy {accuracy}.")
    _print(f"Ranking: {out / 'ranking.json'}, maps: {out / 'atlas.png'}")


@app.command()
def prune(
    model: ModelArgument,
    ranking: Annotated[
        Path | None, typer.Option("--ranking", help="Of locate: keep only its gather and aggregate heads.")
    ] = None,
    recipe: RecipeOption = None,
    settings: Settings = None,
    out: Out = None,
    trust_remote_code: Trust = False,
) -> None:
    """Find the minimal model that still retrieves, and what each of its layers is worth: pruning.json in --out."""
    options = _recipe(recipe, settings, model=model)
    ranked = Ranking.read(ranking) if ranking else None
    base = open_checkpoint(options, trust_remote_code)
    retrieval = choice_probe(base.tokenizer, options.locate.probe, options.locate.options)
    out = out or Path("runs") / f"prune-{Path(model).name}"
    _writable(out)
    critical = {r: [s.site for s in ranked.heads if s.role == r] if ranked else [] for r in ("gather", "aggregate")}
    found = cut_down(
        surgery.adopt(base.model), base.tokenizer, retrieval, Knowledge(options.data.facts), **critical,
        examples=options.locate.examples, batch_size=options.locate.batch_size, seed=options.seed, name=base.name,
        recipe=options.model_dump(mode="json"),
    )  # fmt: skip
    on_main(partial(found.write, out / "pruning.json"))
    cuts = [found.base, *found.shortened, *found.left_out, *found.kept.values(), *found.last_row.values()]
    _table(
        ["what is left", "retrieval", "knowledge"],
        [[c.what, str(c.retrieval.accuracy), str(c.knowledge.accuracy)] for c in cuts],
    )
    _print(f"Layers: {found.kinds}. Minimal model: the first {found.minimal}. All of it: {out / 'pruning.json'}")


@app.command()
def plan(ranking: Path, out: Out = None, settings: Settings = None) -> None:
    """Decide which heads become attention: plan.json beside the ranking. Settings: plan.heads=2, plan.sites=L1.H3,6, ... The
    seed is the ranking's, unless it is set."""
    ranked = Ranking.read(ranking)
    options = _recipe(None, settings, model=ranked.provenance.base)
    seed = options.seed if "seed" in options.model_fields_set else None  # the ranking's
    chosen = surgery.plan(ranked, **options.plan.model_dump(), seed=seed)
    out = out or ranking.with_name("plan.json")
    chosen.write(out)
    _print(f"attention at {', '.join(map(str, chosen.sites))}: {out}")


@app.command()
def splice(
    model: ModelArgument, plan: Path, out: Annotated[Path, typer.Option("--out")], settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Put a plan's grafts into a model: a hybrid folder, untrained."""
    chosen = Plan.read(plan)
    base = open_checkpoint(in_dtype_of(chosen, _recipe(None, settings, model=model)), trust_remote_code)
    check_base(chosen, base.fingerprint)
    hybrid = surgery.splice(base.model, chosen, open_donor(chosen, trust_remote_code))
    surgery.export(hybrid, out, tokenizer=base.tokenizer, plan=chosen, base=base.name)
    _print(f"hybrid: {out}")


@app.command()
def tune(
    hybrid: ModelArgument, out: Annotated[Path, typer.Option("--out")], recipe: RecipeOption = None, settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is trained and what it costs; write nothing.")] = False,
    base: Annotated[str | None, typer.Option("--base", help="Its base, if not where the hybrid says.")] = None,
    resume: Resume = False, trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Tune a hybrid's grafts: a tuned hybrid folder. Checkpoints lie in <out>-tuning. Processes started by `accelerate launch`
    divide every batch, and with FSDP (version 2) also the model."""
    options = _recipe(recipe, settings, model=hybrid)
    check_trackers(options.tune)
    plan = plan_of(hybrid)
    # A whole model may be too large for one device.
    placed = options.model_copy(update={"device": "cpu"}) if divided() else options
    joined = is_patch(hybrid)
    loaded = open_checkpoint(placed, trust_remote_code, base if joined else None)
    batches.check(loaded.tokenizer, options.tune, options.data, options.bench, options.seed)
    if options.tune.lora is not None:
        matches(loaded.model, options.tune.lora)
    named = base_of(hybrid) if base is None else base
    teacher = None
    if not holds_base(hybrid):
        opened = in_dtype_of(plan, placed.model_copy(update={"model": there(named, hybrid)}))
        original = open_checkpoint(opened, trust_remote_code)
        if opened.dtype == plan.dtype:
            check_base(plan, original.fingerprint)
        teacher = surgery.adopt(original.model)
    if dry_run:
        _rehearsed(rehearse(
            loaded.model, loaded.tokenizer, options.tune, data=options.data, seed=options.seed, teacher=teacher
        ))  # fmt: skip
        return
    work = out.with_name(f"{out.name}-tuning")
    on_main(partial(_writable, work))
    log = surgery.tune(
        loaded.model,
        loaded.tokenizer,
        options.tune,
        data=options.data,
        seed=options.seed,
        teacher=teacher,
        out=work,
        resume=resume,
    )
    on_main(partial(surgery.export, loaded.model, out, tokenizer=loaded.tokenizer, plan=plan, base=named, recipe=options))
    for stage in dict.fromkeys(record["stage"] for record in log):
        records = [record for record in log if record["stage"] == stage]
        what = "retrieval" if "retrieval" in records[0] else "loss"
        _print(f"{stage}: {what} {records[0][what]:.3f} -> {records[-1][what]:.3f}")
    _print(f"hybrid: {out}")


@app.command()
def export(
    hybrid: ModelArgument, out: Annotated[Path, typer.Option("--out")],
    form: Annotated[str, typer.Option("--as", help=f"The form: {', '.join(FORMATS)}.")] = "hf",
    base: Annotated[
        str | None, typer.Option("--base", help="Its base, if not as the hybrid says: a folder or, to be published, a Hub id.")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Of bench: what was measured, for the card.")] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Divide weights into files of at most this, e.g. 2GB.")
    ] = None,
    settings: Settings = None, trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Write a hybrid, or a patch and its base, in another form, and verify it."""
    if form not in FORMATS:
        raise surgery.UserError(f"cannot export as '{form}'; there are {', '.join(FORMATS)}")
    plan, joined = plan_of(hybrid), is_patch(hybrid)
    loaded = open_checkpoint(_recipe(None, settings, model=hybrid), trust_remote_code, base if joined else None)
    papers = papers_of(hybrid, loaded.model)
    if report is not None:
        papers |= {"report": report_on(loaded.model, plan, report), "figures": report.parent}
    named = base_of(hybrid) if base is None or (joined and form != "patch") else base
    if form == "patch":
        there(named, hybrid)
    options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    surgery.export(loaded.model, out, form=form, tokenizer=loaded.tokenizer, plan=plan, base=named, **papers, **options)
    _print(f"{form}: {out}")


@app.command()
def publish(
    folder: Path, repo: Annotated[str, typer.Argument(help="Where to, e.g. name/model.")],
    private: Annotated[bool, typer.Option("--private", help="Make a repository that only you can see.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; print what would be sent.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model there that is no export of this toolkit.")
    ] = False,
) -> None:  # fmt: skip
    """Send a verified export to the Hub with its card, in one commit, and compare what arrived. What an earlier export there
    had and this one has not is deleted; other files stay."""
    done = send(folder, repo, private=private, dry_run=dry_run, overwrite=overwrite)
    _print(done.proof.line())
    _table(["file", "bytes"], [[name, f"{size:,}"] for name, size in done.files.items()])
    if done.url is None:
        _print(f"{done.card}\nNothing was sent to {repo}: {sum(done.files.values()):,} bytes and this card would be.")
        return
    if done.deleted:
        _print(f"Deleted there, of what stood there before: {', '.join(done.deleted)}.")
    if done.others:
        _print(f"The repository also holds {', '.join(done.others)}, which this export knows nothing of.")
    _print(f"Sent and compared: {done.url} (commit {done.commit})")


@app.command()
def bench(
    base: ModelArgument, hybrids: Annotated[list[str], typer.Argument(help="Hybrids, or other models, to compare.")],
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require", metavar="REQUIREMENT",
            help="E.g. 'kv.64 >= base + 0.3', 'perplexity <= base * 1.02'; of every model but the base, or of one: "
            "'tuned.kv.64 >= 0.9'. If one is not met: exit status 1.",
        ),
    ] = None,
    recipe: RecipeOption = None, settings: Settings = None, out: Out = None, resume: Resume = False,
    trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Compare models on the same examples: report.html, .md and .json and figures in --out (runs/bench-<first hybrid>).

    What is measured: bench.suites, of quick, retrieval, language, knowledge, paper and speed, e.g. --set
    bench.suites=[quick,speed]. A cell that an earlier run into the same folder has finished is not measured again. `accelerate
    launch -m surgery bench ...` divides the cells among processes.
    """
    out = out or Path("runs") / f"bench-{Path(hybrids[0]).name}"
    options = _recipe(recipe, settings, model=base)
    wanted = [requirement(text, list(labels(hybrids)), names(options.bench)) for text in require or []]
    report = compare(options, hybrids, out, resume=resume, trust_remote_code=trust_remote_code)
    failures = [line for one in wanted for line in one.failures(report)]
    if is_main():
        _table(*markdown.rows(report))
        _print(f"Report: {out / 'report.html'} (and .md, .json)")
        for line in failures:
            print(f"surgery: {line}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


@app.command()
def report_schema() -> None:
    """Print the JSON schema of report.json, with what every field means."""
    print(json.dumps(Report.model_json_schema(mode="serialization"), indent=2))


@app.command()
def tasks_path() -> None:
    """Print the folder of this project's probes as tasks of lm-evaluation-harness, for its --include_path."""
    print(TASKS)


@app.command()
def doctor(
    bench: Annotated[
        bool, typer.Option("--bench", help="Also measure the kernels against what they replace (minutes).")
    ] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help=f"Measure only this: {', '.join(GROUPS)}.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time for each measurement, at least.")] = 6.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the JSON to this file; with --only, into what was measured before.")
    ] = None,
) -> None:
    """Say which kernel serves which operation here, and why the others do not."""
    if unknown := set(only or ()) - set(GROUPS):
        raise surgery.UserError(f"nothing to measure is named '{min(unknown)}'; there are {', '.join(GROUPS)}")
    found: Diagnosis | Benchmark = benchmark(tuple(only or GROUPS), seconds=seconds) if bench else diagnose()
    if out:
        if isinstance(found, Benchmark) and only and out.exists():
            found = Benchmark.read(out).updated(found)
        found.write(out)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    _print(describe(found.environment))
    _table(*(cell_rows(found) if isinstance(found, Benchmark) else verdict_rows(found)))


@app.command()
def pretrain(recipe: Path, out: Annotated[Path, typer.Option("--out")]) -> None:
    """Train a built-in reference model on the small world, from scratch (tens of minutes on a CPU)."""
    _writable(out.parent)
    for name, value in train_base(read_pretrain_recipe(recipe), out).items():
        _print(f"{name}: {value}")


def main() -> None:
    """Entry point. A UserError ends with its one line on standard error and status 2."""
    logging.set_verbosity_error()  # transformers' notes on GPU kernels that are missing are not for our users
    logging.disable_progress_bar()  # one bar at a time: ours

    try:
        copy_context().run(app)  # in a context of its own, so that the backends it asks for are not asked for afterwards
    except (surgery.UserError, KernelError) as error:
        if is_main():
            print(f"surgery: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _recipe(path: Path | None, settings: list[str] | None, **fixed: str) -> Recipe:
    """Read the recipe, and ask for its kernels from here on."""
    options = read_recipe(path, settings, **fixed)
    ask(**options.kernels)
    return options


def _writable(folder: Path) -> None:
    """Fail before the work begins, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise surgery.UserError(f"cannot write to {folder}: {error.strerror}") from error


def _rehearsed(found: Rehearsal) -> None:
    _table(*found.tensor_rows())
    _print(f"{found.numbers():,} numbers in {len(found.trained)} tensors would be trained.")
    _table(*found.cost_rows())
    _print(
        "Measured here: the time of a step, and the memory that it takes beyond the weights. Computed from sizes: weights, "
        "gradients and optimizer; activations are what remains. The stages before the steps, and early stopping, come on top."
    )
    if found.padding is not None:
        _print(f"Padding: {found.padding:.1%} of the text.")
    _print("Nothing was written.")


def _print(text: str) -> None:
    if is_main():
        Console().print(text, highlight=False, markup=False, soft_wrap=True)


def _table(header: list[str], body: list[list[str]]) -> None:
    if not is_main():
        return
    table = Table(*header)
    for row in body:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
