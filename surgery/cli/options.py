"""Arguments and options that several verbs share, and what reads them."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from surgery.cli.used_settings import refuse_unused
from surgery.errors import UserError
from surgery.exporting.verifications import VERIFICATIONS
from surgery.records.reading import check_name

if TYPE_CHECKING:
    from surgery.records.recipe import Recipe


# A name that leads nowhere is refused before a verb imports torch. Help texts need not wait for loading/hub.py.
def check_model(name: str | list[str]) -> str | list[str]:
    from surgery.loading.hub import check_model

    for each in [name] if isinstance(name, str) else name:
        check_model(each)
    return name


def check_hybrid(name: str) -> str:
    from surgery.loading.hub import check_hybrid

    return check_hybrid(name)


def check_there(place: Path | list[Path] | None) -> Path | list[Path] | None:
    for each in place if isinstance(place, list) else [place]:
        if each is not None and not check_name(each).exists():
            raise UserError(f"cannot read {each}: No such file or directory")
    return place


ModelArgument = Annotated[
    str, typer.Argument(help="Hub id, Hugging Face folder, original state-spaces folder, or patch.", callback=check_model)
]
HybridArgument = Annotated[str, typer.Argument(help="A hybrid's folder, or a patch.", callback=check_hybrid)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, e.g. tune.steps=300.")
]
# A file or a folder.
PlaceArgument = Annotated[Path, typer.Argument(callback=check_there)]
RecipeOption = Annotated[Path | None, typer.Option("--recipe", help="A recipe to take the settings from.", callback=check_name)]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="A text file of yours, of the kind that the model knows.", callback=check_there)
]
Out = Annotated[Path | None, typer.Option("--out", help="Where the output goes.", callback=check_name)]
OutRequired = Annotated[Path, typer.Option("--out", help="Where the output goes.", callback=check_name)]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow code that comes with the checkpoint to run.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, from the first stage whose settings have changed.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Remove the run in --out first.")]
Verify = Annotated[
    str,
    typer.Option(
        "--verify",
        help="How the export is verified: " + "; ".join(f"{way}: {what}" for way, what in VERIFICATIONS.items()) + ".",
    ),
]
ReplaceExport = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in --out.")]

EnginePython = Annotated[
    Path | None,
    typer.Option("--engine-python", help="The Python that is run for the suite serving, from an environment with vLLM."),
]
TaskCode = Annotated[bool, typer.Option("--trust-task-code", help="Allow code of the tasks in bench.include_path to run.")]

until_the_end = ExitStack()  # what holds until the command ends


def recipe_of(verb: str, path: Path | None, settings: list[str] | None, **fixed: str) -> "Recipe":
    """Read a verb's recipe, and ask for its kernels until the command ends. Raises UserError for settings that the verb does
    not use."""
    from surgery.records.recipe import read_recipe

    recipe = read_recipe(path, settings, **fixed)
    refuse_unused(verb, settings or ())
    if recipe.kernels:
        import surgery.kernels.operations  # noqa: F401  # so that a backend that does not exist is refused now
        from surgery.kernels.dispatch import use

        until_the_end.enter_context(use(**recipe.kernels))
    return recipe


def check_writable(folder: Path) -> None:
    """Make a folder. Raises UserError where it cannot be made, or holds no more: before the work begins, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
