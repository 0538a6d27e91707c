"""The command line: parses, calls, prints. What a verb does is in the module of its name."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
        "Finds the retrieval heads of a pretrained Mamba and splices attention in their place: "
        "locate, plan, splice, tune, export, bench. `run` does all of it from one recipe."
    ),
)  # fmt: skip

ModelArgument = Annotated[str, typer.Argument(help="Hub id, Hugging Face folder, or original state-spaces folder.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, e.g. tune.steps=300.")
]
RecipeOption = Annotated[Path | None, typer.Option("--recipe", help="A recipe to take the settings from.")]
Out = Annotated[Path | None, typer.Option("--out", help="Where the output goes.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow code that comes with the checkpoint to run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]


@app.command()
def run(recipe: Path, out: Out = None, settings: Settings = None, resume: Resume = False, trust_remote_code: Trust = False) -> None:
    """Do everything that a recipe says; output to runs/<recipe>."""
    from surgery.bench import markdown
    from surgery.recipe import read_recipe
    from surgery.run import run as job

    out = out or Path("runs") / recipe.stem
    report = job(read_recipe(recipe, settings), out, resume=resume, trust_remote_code=trust_remote_code)
    _table(*markdown.rows(report))
    _print(markdown.EXPLANATION + "\n")
    for name, model in report.models.items():
        sites = f" ({', '.join(map(str, model.plan.sites))})" if model.plan else ""
        _print(f"{name}: {model.description}{sites}")
    _print(f"\nReport: {out / 'report.md'}\nHybrid: {out / 'hybrid'}")


@app.command()
def locate(
    model: ModelArgument, recipe: RecipeOption = None, settings: Settings = None, out: Out = None, trust_remote_code: Trust = False
) -> None:
    """Rank every head: ranking.json, atlas.png and mixing.png in --out (runs/locate-<model>)."""
    from surgery.locate import atlas
    from surgery.locate import locate as rank
    from surgery.recipe import read_recipe
    from surgery.run import open_checkpoint

    options = read_recipe(recipe, settings, model=model)
    base = open_checkpoint(options, trust_remote_code)
    out = out or Path("runs") / f"locate-{Path(model).name}"
    _writable(out)
    ranking = rank(
        base.model, base.tokenizer, **options.locate.model_dump(), seed=options.seed, name=base.name,
        recipe=options.model_dump(mode="json"),
    )  # fmt: skip
    ranking.write(out / "ranking.json")
    atlas.draw_scores(ranking, out / "atlas.png")
    atlas.draw_mixing(base.model, base.tokenizer, ranking, out / "mixing.png")
    fields = ("splice_gain", "splice_loss", "attribution", "ablation_drop")
    body = [[str(s.site), s.role or "", *(str(getattr(s, f) or "") for f in fields)] for s in ranking.heads[:10]]
    _table(["site", "role", *(f.replace("_", " ") for f in fields)], body)
    _print(f"Base accuracy {ranking.base_accuracy}. Ranking: {out / 'ranking.json'}, maps: {out / 'atlas.png'}")


@app.command()
def plan(ranking: Path, out: Out = None, settings: Settings = None) -> None:
    """Decide which heads become attention: plan.json beside the ranking. Settings: plan.heads=2, plan.sites=[L1.H3], ..."""
    from surgery.locate import Ranking
    from surgery.locate import plan as decide
    from surgery.recipe import read_recipe

    ranked = Ranking.read(ranking)
    options = read_recipe(None, settings, model=ranked.provenance.base)
    chosen = decide(ranked, **options.plan.model_dump(), seed=options.seed)
    out = out or ranking.with_name("plan.json")
    chosen.write(out)
    _print(f"attention at {', '.join(map(str, chosen.sites))}: {out}")


@app.command()
def splice(
    model: ModelArgument, plan: Path, out: Annotated[Path, typer.Option("--out")], settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Put a plan's grafts into a model: a hybrid folder, untrained."""
    from surgery.export import export
    from surgery.plan import Plan
    from surgery.recipe import read_recipe
    from surgery.run import open_checkpoint
    from surgery.splice import splice as put

    chosen = Plan.read(plan)
    base = open_checkpoint(read_recipe(None, settings, model=model), trust_remote_code)
    _same_base(chosen, base.fingerprint)
    export(put(base.model, chosen), out, tokenizer=base.tokenizer, plan=chosen, base=base.name)
    _print(f"hybrid: {out}")


@app.command()
def tune(
    hybrid: ModelArgument, out: Annotated[Path, typer.Option("--out")], recipe: RecipeOption = None, settings: Settings = None,
    resume: Resume = False, trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Tune a hybrid's grafts: a tuned hybrid folder. Checkpoints lie in <out>-tuning."""
    from surgery.export import export
    from surgery.plan import Plan
    from surgery.recipe import read_recipe
    from surgery.run import open_checkpoint
    from surgery.tune import tune as train

    options = read_recipe(recipe, settings, model=hybrid)
    plan = Plan.read(Path(hybrid) / "plan.json")
    loaded = open_checkpoint(options, trust_remote_code)
    work = out.with_name(f"{out.name}-tuning")
    _writable(work)
    log = train(loaded.model, loaded.tokenizer, options.tune, data=options.data, seed=options.seed, out=work, resume=resume)
    base = plan.provenance.base if plan.provenance else hybrid
    export(loaded.model, out, tokenizer=loaded.tokenizer, plan=plan, base=base, recipe=options)
    _print(f"retrieval loss {log[0]['retrieval']:.3f} -> {log[-1]['retrieval']:.3f} nats; hybrid: {out}")


@app.command()
def export(
    hybrid: ModelArgument, out: Annotated[Path, typer.Option("--out")],
    form: Annotated[str, typer.Option("--as", help="hf: a complete folder for transformers.")] = "hf",
    settings: Settings = None, trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Write a hybrid in another form, and verify it."""
    from surgery.errors import UserError
    from surgery.export import export as write
    from surgery.plan import Plan
    from surgery.recipe import read_recipe
    from surgery.run import open_checkpoint

    if form != "hf":
        raise UserError(f"cannot export as '{form}'; there is: hf")
    plan = Plan.read(Path(hybrid) / "plan.json")
    loaded = open_checkpoint(read_recipe(None, settings, model=hybrid), trust_remote_code)
    base = plan.provenance.base if plan.provenance else hybrid
    difference = write(loaded.model, out, tokenizer=loaded.tokenizer, plan=plan, base=base)
    _print(f"reloaded logits differ by {difference:g}; hybrid: {out}")


@app.command()
def bench(
    base: ModelArgument, hybrids: Annotated[list[str], typer.Argument(help="Hybrids, or other models, to compare.")],
    recipe: RecipeOption = None, settings: Settings = None, out: Out = None, resume: Resume = False,
    trust_remote_code: Trust = False,
) -> None:  # fmt: skip
    """Compare models on the same examples: report.json, report.md and figures in --out (runs/bench-<first hybrid>)."""
    from surgery.bench import markdown
    from surgery.recipe import read_recipe
    from surgery.run import compare

    out = out or Path("runs") / f"bench-{Path(hybrids[0]).name}"
    report = compare(read_recipe(recipe, settings, model=base), hybrids, out, resume=resume, trust_remote_code=trust_remote_code)
    _table(*markdown.rows(report))
    _print(f"Report: {out / 'report.md'}")


@app.command()
def pretrain(recipe: Path, out: Annotated[Path, typer.Option("--out")]) -> None:
    """Train a built-in reference model on the small world, from scratch (tens of minutes on a CPU)."""
    from surgery.tune.pretrain import pretrain as train
    from surgery.tune.pretrain import read_pretrain_recipe

    options = read_pretrain_recipe(recipe)
    _writable(out.parent)
    for name, value in train(options, out).items():
        _print(f"{name}: {value}")


def main() -> None:
    """Entry point. A UserError ends with its one line on standard error and status 2."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notes on missing GPU kernels are not for our users
    os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar: ours
    from surgery.errors import UserError

    try:
        app()
    except UserError as error:
        print(f"surgery: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _writable(folder: Path) -> None:
    """Fail before the work begins, not after it."""
    from surgery.errors import UserError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error


def _same_base(plan, fingerprint: str) -> None:
    from surgery.errors import UserError

    if plan.provenance is not None and plan.provenance.base_fingerprint != fingerprint:
        raise UserError(f"the plan was made for another base ({plan.provenance.base}); its fingerprint differs")


def _print(text: str) -> None:
    from rich.console import Console

    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def _table(header: list[str], body: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    for row in body:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
