"""Arguments and options that several commands share, and what can be checked of them before torch is imported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.errors import UserError, did_you_mean
from surgery.records.recipe import HUB_ID, TOY
from surgery.runtime.files import read_text

WEIGHTS = ("config.json", "patch.json")
TEXTS = (".txt", ".md", ".jsonl", ".csv", ".parquet", ".json")
KINDS = {"ranking": {"heads", "probe"}, "plan": {"sites", "starts"}, "report": {"verdict", "models"}}


def check_model(name: str) -> str:
    """The name of a model that may be there. Raises UserError, and says what lies there instead."""
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        raise UserError(f"{name} is in GGUF, which is for serving; give the folder of the checkpoint that it was made from")
    if path.is_file():
        raise UserError(f"{name} is a file; give the model's folder" + (f": {path.parent}" if path.name in WEIGHTS else ""))
    if path.is_dir():
        _list(path)
        read_fields(name)
        return name
    if path.exists():
        raise UserError(f"{name} is no folder; give the model's folder")
    if not HUB_ID.fullmatch(name):
        raise UserError(f"there is no folder {name}{_close(path)}; an id on the Hub has the form OWNER/NAME")
    if path.parent.is_dir():
        raise UserError(f"there is no folder {name}{_close(path)}")
    return name


def check_file(path: Path | None) -> Path | None:
    """A file or folder that is there. Raises UserError."""
    if path is not None and not path.exists():
        raise UserError(f"there is no file {path}{_close(path)}")
    return path


def check_data(data: Any) -> None:
    """Raise UserError for a text or facts that a recipe names and that are not there. data: its section."""
    named = [("train_text", name) for name in data.train_text] + [("held_out_text", data.held_out_text), ("facts", data.facts)]
    for key, name in named:
        path = Path(name)
        hub = key != "facts" and HUB_ID.fullmatch(name) and path.suffix not in TEXTS and not path.parent.is_dir()
        if name not in (TOY, "capitals") and not path.exists() and not hub:
            raise UserError(f"there is no file {name}{_close(path)} (data.{key})")


def own_grafts(name: str) -> list[Any]:
    """The grafts in a local folder that did not come with the base."""
    return [entry for entry in read_fields(name).get("grafts") or () if isinstance(entry, dict) and not entry.get("of_base")]


def refuse_hybrid(name: str) -> None:
    """Raise UserError for a local folder that holds a hybrid of ours where a base is wanted."""
    if own_grafts(name):
        raise UserError(f"{name} is a hybrid already; give its base")


def refuse_base(name: str) -> None:
    """Raise UserError for a local folder that holds no graft of ours where a hybrid is wanted."""
    if (Path(name) / "config.json").exists() and not own_grafts(name):
        raise UserError(f"{name} is no hybrid: it holds no grafts; make one with `surgery splice {name} PLAN --out HYBRID`")


def read_fields(name: str) -> dict[str, Any]:
    """config.json of a local folder; nothing where there is none."""
    path = Path(name) / "config.json"
    if not path.exists():
        return {}
    try:
        held = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    return held if isinstance(held, dict) else {}


def read_record(path: Path, kind: Any) -> Any:
    """A ranking, plan or report. Raises UserError that says what the file is instead."""
    path = path / f"{kind.__name__.lower()}.json" if path.is_dir() else path
    text = read_text(path)
    try:
        keys = set(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        keys = set()
    wanted = kind.__name__.lower()
    other = next((name for name, marks in KINDS.items() if name != wanted and marks <= keys), None)
    if other is not None and not keys >= KINDS[wanted]:
        raise UserError(f"{path} is a {other}; here a {wanted} is wanted, {wanted}.json")
    return kind.read(path)


def open_model(name: str, options: Any = None, trust_remote_code: bool = False, *, dtype: str = "auto") -> tuple[Any, Any]:
    """(model, tokenizer), without transformers' bars. options: a Recipe with dtype, device and tokenizer; or dtype alone."""
    from transformers.utils import logging

    from surgery.models.load import load

    logging.disable_progress_bar()
    if options is None:
        return load(name, dtype, trust_remote_code=trust_remote_code)
    given = {"dtype": options.dtype, "device": options.device, "tokenizer": options.tokenizer}
    return load(name, trust_remote_code=trust_remote_code, **given)


def _list(folder: Path) -> None:
    try:
        held = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error
    if not held & {*WEIGHTS, "params.json", "adapter_config.json"}:
        found = [place for place in ("hybrid", "model") if (folder / place / "config.json").exists()]
        hint = f"; {folder / found[0]} is one" if found else ""
        raise UserError(f"{folder} holds no model: there is no config.json{hint}")


def _close(path: Path) -> str:
    """A hint at what lies there or beside."""
    if path.is_symlink():
        return ", but a link that leads nowhere"
    return did_you_mean(path.name, (each.name for each in path.parent.iterdir()), path.parent) if path.parent.is_dir() else ""


def _checked(*checks: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A callback of typer that runs checks, of values that are given."""

    def callback(value: Any) -> Any:
        for check in checks if value is not None else ():
            check(value)
        return value

    return callback


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a Hub id, or a patch.", callback=_checked(check_model))
]
BaseArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="The base: a folder or a Hub id.", callback=_checked(check_model, refuse_hybrid))
]
HybridArgument = Annotated[
    str, typer.Argument(metavar="HYBRID", help="A hybrid's folder, or a patch.", callback=_checked(check_model, refuse_base))
]
RankingArgument = Annotated[
    Path, typer.Argument(metavar="RANKING", help="ranking.json, or the folder that holds it.", callback=_checked(check_file))
]
PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="plan.json, or the folder that holds it.", callback=_checked(check_file))
]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. tune.steps=300.")]
RecipeOption = Annotated[
    Path | None, typer.Option("--recipe", help="A recipe to take the settings from.", callback=_checked(check_file))
]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="Text of the kind that the model knows.", callback=_checked(check_file))
]
OutFile = Annotated[Path, typer.Option("--out", help="The file to write.")]
OutFolder = Annotated[Path, typer.Option("--out", help="The folder to write to.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow code that comes with the checkpoint to run.")]
Dtype = Annotated[str, typer.Option("--dtype", help="What it is written in: stored, auto, float32, bfloat16, float16.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote to --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
