"""surgery run"""

from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.options import (
    Overwrite,
    Resume,
    Settings,
    TextOption,
    Trust,
    check_data,
    check_file,
    check_model,
    open_model,
    refuse_hybrid,
)
from surgery.errors import UserError
from surgery.records.recipe import TOY, Recipe, apply_settings, make_recipe, read_recipe, recipe_text
from surgery.runtime.files import check_output, read_text
from surgery.runtime.progress import say, show

LEAST_TEXT = 20_000  # characters: fewer are no text to hold a model to


def run(
    target: Annotated[str, typer.Argument(metavar="MODEL|RECIPE", help="A model (folder or Hub id), or a recipe's file.")],
    text: TextOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write to; runs/NAME by default.")] = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and write nothing.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Go on although a first look says that it is not worth trying.")
    ] = False,
    verify: Annotated[str, typer.Option("--verify", help="How to verify the export: quick or full.")] = "quick",
    trust_remote_code: Trust = False,
) -> None:
    """Edit a model and say whether it helped, or follow a recipe.

    For a model, a first look chooses the recipe, which --set changes; it is kept as recipe.yaml, with which --resume goes on.
    The folder then holds report.html, the hybrid, and what each step found. Exit status 1: the model is not worth editing, or
    another skill was lost.

    Examples:
      surgery run checkpoints/tiny-mamba2 --dry-run
      surgery run MODEL --text my.txt
      surgery run recipes/demo.yaml
    """
    if verify not in ("quick", "full"):
        raise UserError(f"--verify takes quick or full, not '{verify}'")
    place = Path(target)
    is_recipe = place.suffix in (".yaml", ".yml")
    out = out or Path("runs") / (place.stem if is_recipe else place.resolve().name)  # also of "."
    if is_recipe:
        if text is not None:
            raise UserError("--text is for a model; a recipe names its texts itself, in data.train_text and data.held_out_text")
        check_file(place)
        recipe = read_recipe(place, settings)
        check_model(recipe.model)
        refuse_hybrid(recipe.model)
    else:
        check_model(target)
        refuse_hybrid(target)
        recipe = make_recipe(apply_settings({"model": target}, settings), "--set")  # a wrong setting is refused before any work
        if text is not None:
            check_text(text)
    check_data(recipe.data)
    if not dry_run:
        check_output(out, [*recipe.input_files(), *([text] if text else [])], resume=resume, overwrite=overwrite)
    chosen = out / "recipe.yaml"
    if resume and not is_recipe and chosen.exists():
        recipe, is_recipe = resumed(chosen, target, text, settings), True
    from surgery import automatic
    from surgery.evaluation.verdict import lost
    from surgery.look import look
    from surgery.pipeline import run as run_recipe

    if not is_recipe or dry_run:
        model, tokenizer = open_model(recipe.model, recipe, trust_remote_code)
        seen = look(model, tokenizer, text=text, name=place.resolve().name, seed=recipe.seed)
        if not is_recipe:
            show(seen)
            recipe = automatic.choose_recipe(seen, target, text, settings)
        if dry_run:
            check_here(model, tokenizer, recipe)
            show(f"\n{recipe_text(recipe)}\nEstimate: {automatic.estimate(recipe, seen)}")
        del model
        if not seen.worth and not is_recipe and not anyway:
            show("Nothing was done. --anyway goes on." if not seen.why_not else "Nothing was done.")
            raise typer.Exit(1)
        if dry_run:
            return
        say(f"estimate: {automatic.estimate(recipe, seen)}")
    report = run_recipe(recipe, out, resume=resume, overwrite=overwrite, trust_remote_code=trust_remote_code, verify=verify)
    show(report.summary())
    show(f"\nReport: {out / 'report.html'}\nHybrid: {out / 'hybrid'}")
    show(f'Use it: AutoModelForCausalLM.from_pretrained("{out / "hybrid"}", trust_remote_code=True)')
    if more := automatic.go_on(recipe, report, out, trust_remote_code):
        show(more)
    if lost(report.measurements, report.main):
        raise typer.Exit(1)


def check_here(model: Any, tokenizer: Any, recipe: Recipe) -> None:
    """Raise UserError for what a later stage could not do, as far as it can be known without fetching anything."""
    from surgery.pipeline import check_recipe

    offline = recipe.model_copy(update={"bench": recipe.bench.model_copy(update={"tasks": ()})})
    if all(name == TOY or Path(name).exists() for name in (*recipe.data.train_text, recipe.data.held_out_text)):
        check_recipe(model, tokenizer, offline)


def resumed(chosen: Path, target: str, text: Path | None, settings: list[str]) -> Recipe:
    """The recipe that an earlier run chose, with what is set or given now before it."""
    from surgery.automatic import text_settings

    recipe = read_recipe(chosen, [*(text_settings(text) if text is not None else []), *settings])
    if Path(recipe.model).resolve() != Path(target).resolve():
        raise UserError(f"{chosen.parent} holds a run on {recipe.model}, not on {target}; choose another --out")
    check_data(recipe.data)
    return recipe


def check_text(text: Path) -> None:
    """Raise UserError for a text that cannot be read or is too short to be divided; before anything else is done."""
    if text.suffix not in ("", ".txt", ".md"):
        raise UserError(
            f"--text takes plain text (.txt, .md), not {text}; for tables set data.train_text and data.held_out_text"
        )
    if (length := len(read_text(text))) < LEAST_TEXT:
        raise UserError(f"{text} has {length:,} characters; at least {LEAST_TEXT:,} are needed, a hundred pages are better")
